"""Names the first page's scripts in its HTML, so that the browser reads them at once.

Without it each is asked for only when the first element of its kind arrives: after the
frontend has started, the connection stands and the page's script has run.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import streamlit

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Send], Awaitable[None]]

# Kinds of elements that Explore shows, by the names in Streamlit's own list of its files.
FIRST_PAGE: Final = (
    "PlotlyChart",
    "Selectbox",
    "NumberInput",
    "Metric",
    "Checkbox",
    "ButtonGroup",
    "DownloadButton",
    "Button",
    "Progress",
    "DataFrame",
)
STATIC: Final = Path(streamlit.__file__).with_name("static")
_HEAD: Final = b"</head>"


def links(static: Path, names: tuple[str, ...] = FIRST_PAGE) -> str:
    """Returns link elements for the scripts of these kinds and for all that they import.

    What the page names already is left out, and so is a kind that is not known: the page
    works without, as Streamlit's own does.
    """
    try:
        manifest = json.loads((static / "manifest.json").read_text())
        page = (static / "index.html").read_text()
    except (OSError, ValueError):
        return ""
    wanted: dict[str, None] = {}
    for name in names:
        for key, entry in manifest.items():
            if entry.get("name") == name:
                _gather(manifest, key, wanted)
    files = [manifest[key]["file"] for key in wanted]
    return "".join(
        f'<link rel="modulepreload" crossorigin href="./{file}">'
        for file in files
        if file not in page and file.endswith(".js")
    )


def _gather(manifest: Mapping[str, Any], key: str, found: dict[str, None]) -> None:
    """Adds an entry of the list of files and what it imports."""
    if key in found or key not in manifest:
        return
    found[key] = None
    for other in manifest[key].get("imports", ()):
        _gather(manifest, other, found)


@cache
def _links() -> bytes:
    return links(STATIC).encode()


class Preload:
    """ASGI middleware that adds the links to the head of every HTML page."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Serves a request; whatever is no HTML page passes as it is."""
        page = _Page(send)
        await self.app(scope, receive, page.send if scope["type"] == "http" else send)


class _Page:
    """An answer on its way: HTML is held until it is whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_html(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_page(self._start)

    async def _send_page(self, start: Message) -> None:
        body = self._body.replace(_HEAD, _links() + _HEAD, 1)
        if body != self._body:
            others = [h for h in start["headers"] if h[0].lower() != b"content-length"]
            headers = [*others, (b"content-length", str(len(body)).encode())]
            start = {**start, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def _is_html(start: Message) -> bool:
    kinds = [value for name, value in start["headers"] if name.lower() == b"content-type"]
    return any(kind.startswith(b"text/html") for kind in kinds)
