"""Reading a store that is not there makes no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.store import open_store, store_exists

testing = pytest.importorskip("streamlit.testing.v1")


@pytest.mark.parametrize("prefix", ["", "sqlite:///"])
def test_readers_refuse_a_store_that_is_not_there(tmp_path: Path, prefix: str) -> None:
    url = f"{prefix}{tmp_path / 'new' / 'runs.sqlite'}"
    assert not store_exists(url)
    with pytest.raises(InputError, match="the store does not exist"):
        open_store(url, create=False)
    assert not (tmp_path / "new").exists()
    open_store(url).close()
    assert store_exists(url)
    assert open_store(url, create=False).measurements() == []


def test_the_dashboard_shows_its_empty_state_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOPWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLOPWRIGHT_STORE", raising=False)
    text = "from flopwright.dashboards.app_pages.compare import page\npage()"
    app = testing.AppTest.from_string(text, default_timeout=60).run()
    assert not app.exception
    assert "No runs yet" in app.info[0].value
    assert list(tmp_path.iterdir()) == []
