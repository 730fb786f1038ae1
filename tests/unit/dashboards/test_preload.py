"""The first page's HTML names the scripts that it will need; nothing else is touched."""

from __future__ import annotations

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from flopwright.dashboards.preload import FIRST_PAGE, STATIC, Preload, links

PAGE = (STATIC / "index.html").read_bytes()


class Links(HTMLParser):
    """The scripts that a page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.named: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "link" and found.get("rel") == "modulepreload":
            self.named.append(str(found["href"]).removeprefix("./"))


def served(kind: str, parts: list[bytes], scope: str = "http") -> list[dict[str, Any]]:
    """What comes out of an application that answers with these parts."""
    length = str(sum(map(len, parts))).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", kind.encode()), (b"Content-Length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, part in enumerate(parts):
            more = i + 1 < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    out: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        out.append(dict(message))

    asyncio.run(Preload(app)({"type": scope}, None, send))
    return out


def test_streamlit_has_every_script_that_is_named() -> None:
    """Its list of files is its own: another version may have other names."""
    manifest = json.loads((STATIC / "manifest.json").read_text())
    known = {entry.get("name") for entry in manifest.values()}
    assert set(FIRST_PAGE) <= known
    named = Links(links(STATIC)).named
    assert any("PlotlyChart" in name for name in named)
    assert len(named) == len(set(named)) > len(FIRST_PAGE)
    assert all((STATIC / name).is_file() for name in named)
    assert not set(named) & set(Links(PAGE.decode()).named)


def test_a_page_in_parts_names_them_and_says_its_length() -> None:
    start, body = served("text/html; charset=utf-8", [PAGE[:100], PAGE[100:]])
    assert body["body"].replace(links(STATIC).encode(), b"") == PAGE
    assert len(body["body"]) > len(PAGE)
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert [name.lower() for name, _ in start["headers"]].count(b"content-length") == 1


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("text/javascript", [b"</head>", b"x"]), ("application/json", [b"{}"]), ("text/html", [b""])],
)
def test_whatever_is_no_page_passes(kind: str, parts: list[bytes]) -> None:
    start, *rest = served(kind, parts)
    assert b"".join(m["body"] for m in rest) == b"".join(parts)
    assert dict(start["headers"])[b"Content-Length"] == str(len(b"".join(parts))).encode()


def test_without_a_list_of_files_nothing_is_named(tmp_path: Path) -> None:
    assert links(tmp_path) == ""
    (tmp_path / "manifest.json").write_text("[")
    assert links(tmp_path) == ""
