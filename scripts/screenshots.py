"""Takes a picture of each dashboard page into docs/images: scripts/screenshots.py [NAME ...].

Needs Chromium (`apt-get install chromium`) and playwright (`.venv/bin/python -m pip install
playwright`; no `playwright install`). The server runs on a free port of the loopback
interface and is ended with the script. Compare shows the store that FLOPWRIGHT_STORE names,
or the user's own.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flopwright.cli.dashboard import streamlit_command

OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
MAX_BYTES = 300_000
# The browser talks to nobody but the server.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)

_HEIGHT = "document.querySelector('[data-testid=\"stMain\"]')?.scrollHeight || 900"
# Looks, half a second apart, at which a page must be idle and of one height.
_QUIET_LOOKS = 6


class Page(NamedTuple):
    """One picture: its address, and the text (a pattern) and charts it waits for."""

    name: str
    path: str
    text: str
    charts: int


PAGES = (
    Page(
        "explore",
        "?scenario=kimi_k2_pretrain_2048gpu_h800_bf16&top=5",
        "521,004 candidates",
        3,
    ),
    Page("plan", "plan?scenario=kimi_k2_pretrain_2048gpu_h800_bf16", "Download plan.yaml", 1),
    Page("rollouts", "rollouts?rollout=kimi_k2_like_256gpu_h800&sweep=1", "Best lambda", 3),
    Page("compare", "compare", "Predicted against measured step time|No runs yet", 0),
    Page(
        "export",
        "export?scenario=kimi_k2_pretrain_2048gpu_h800_bf16&target=megatron"
        "&plan=pp%3D16+ep%3D16+zero_stage%3D1+recompute%3Dselective+fp8_activations",
        "Look into a file",
        0,
    ),
)


def main(names: list[str]) -> int:
    """Returns 0 when every picture was taken, 2 when something to take them with is missing."""
    missing = missing_tools()
    if missing:
        print("\n".join(("screenshots need what is not here:", *missing)), file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    with server() as address:
        return take([p for p in PAGES if not names or p.name in names], address)


def missing_tools() -> list[str]:
    """Returns one line for each missing tool, with the command that installs it."""
    found = []
    if chromium() is None:
        found.append("  Chromium: apt-get install -y chromium (or set CHROMIUM to its path)")
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        found.append(f"  playwright: {sys.executable} -m pip install playwright")
    return found


def chromium() -> str | None:
    """Returns the path of the browser."""
    named = os.environ.get("CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def server() -> Iterator[str]:
    """Yields the address of a dashboard that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        streamlit_command(port, headless=True),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=1)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        else:
            raise SystemExit("the dashboard did not answer within a minute")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def take(pages: list[Page], address: str) -> int:
    """Takes the pictures; an exception on a page is an error."""
    from playwright.sync_api import sync_playwright

    failed = 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        for page in pages:
            view = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
            view.goto(f"{address}/{page.path}")
            exception = view.locator('[data-testid="stException"]')
            view.get_by_text(re.compile(page.text)).or_(exception).first.wait_for(timeout=300_000)
            problems = exception.count() or settle(view, page.charts)
            path = OUT / f"{page.name}.png"
            # the page scrolls inside a container: a tall window shows all of it
            height = view.evaluate(_HEIGHT)
            view.set_viewport_size({"width": 1280, "height": min(int(height) + 20, 2400)})
            view.wait_for_timeout(1500)
            view.screenshot(path=str(path))
            size = path.stat().st_size
            verdict = "" if size <= MAX_BYTES else f"  LARGER THAN {MAX_BYTES // 1000} kB"
            print(f"{path.relative_to(OUT.parent.parent)}  {size // 1000} kB{verdict}")
            failed += bool(problems) or size > MAX_BYTES
            if problems:
                print(f"  the page shows {problems} exceptions", file=sys.stderr)
            view.close()
        browser.close()
    return 1 if failed else 0


def settle(view: Any, charts: int) -> int:
    """Waits for the charts and until nothing is being computed; returns the exceptions shown."""
    for i in range(charts):
        view.locator(".js-plotly-plot").nth(i).wait_for(timeout=120_000)
    busy = view.locator('[data-testid="stStatusWidget"], [data-testid="stSkeleton"]')
    quiet, height = 0, 0
    for _ in range(240):
        view.wait_for_timeout(500)
        now = int(view.evaluate(_HEIGHT))
        quiet = quiet + 1 if now == height and not busy.count() else 0
        height = now
        if quiet == _QUIET_LOOKS:
            break
    return int(view.locator('[data-testid="stException"]').count())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
