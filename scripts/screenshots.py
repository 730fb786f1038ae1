"""Takes a picture of each dashboard page into docs/images: scripts/screenshots.py [NAME ...].

`--dark` takes the dark scheme, `--more` every tab as well, `--out` another folder.
Needs Chromium (`apt-get install chromium`) and playwright (`.venv/bin/python -m pip install
playwright`; no `playwright install`). The server runs on a free port of the loopback
interface and is ended with the script. Compare shows the store that FLOPWRIGHT_STORE names,
or the user's own.
"""

from __future__ import annotations

import argparse
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


K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"
PLAN = (
    "plan=pp%3D16+ep%3D16+zero_stage%3D1+recompute%3Dselective+fp8_activations+activation_offload"
)
PAGES = (
    Page("explore", f"?scenario={K2}&top=5", r"\d{3},\d{3} candidates", 3),
    Page("plan", f"plan?scenario={K2}", "Download plan.yaml", 1),
    Page("rollouts", "rollouts?rollout=kimi_k2_like_256gpu_h800&sweep=1", "Best lambda", 3),
    Page("compare", "compare", "Predicted against measured step time|No runs yet", 0),
    Page("export", f"export?scenario={K2}&target=megatron&{PLAN}", "What the run should show", 2),
)
MORE = (
    Page(
        "explore_holds", f"?scenario={K2}&tab=What+holds+it+back", "If a resource|resource had", 1
    ),
    Page("explore_serving", f"?scenario={K2}&tab=Serving", "it with its caches", 1),
    Page("explore_cost", f"?scenario={K2}&against=cost", "Trade-offs", 3),
    Page(
        "explore_beside", f"?scenario={K2}&b_scenario={K2}&b_set=cluster%3D1024_h100", "1,024", 6
    ),
    Page("plan_memory", f"plan?scenario={K2}&part=Memory&{PLAN}", "Download plan.yaml", 1),
    Page("plan_sent", f"plan?scenario={K2}&part=Communication&{PLAN}", "busiest stage", 1),
    Page("plan_edit", f"plan?scenario={K2}&part=Edit+a+field&{PLAN}", "Price the edited plan", 0),
    Page("loop", "rollouts?view=loop&loop=kimi_k2_rl_256gpu_h800", "Plan the loop", 0),
    Page("error", f"?scenario={K2}&set=workload.seq_len%3D-5", "cannot be planned", 0),
    Page("nothing_fits", f"?scenario={K2}&set=cluster%3D8_h100", "does not fit", 1),
    Page("compare_one", "compare?tab=One+run", "Look first|No runs yet", 0),
    Page("compare_time", "compare?tab=Over+time", "step time|No runs yet", 0),
    Page("compare_where", "compare?tab=Environment", "First run|Two runs|No runs yet", 0),
)


def main() -> int:
    """Returns 0 when every picture was taken, 2 when something to take them with is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="pages; default: all")
    parser.add_argument("--dark", action="store_true", help="the dark scheme")
    parser.add_argument("--more", action="store_true", help="every tab and state as well")
    parser.add_argument("--out", type=Path, default=OUT, help="folder")
    asked = parser.parse_args()
    missing = missing_tools()
    if missing:
        print("\n".join(("screenshots need what is not here:", *missing)), file=sys.stderr)
        return 2
    known = (*PAGES, *MORE) if asked.more or asked.names else PAGES
    asked.out.mkdir(parents=True, exist_ok=True)
    with server() as address:
        pages = [p for p in known if not asked.names or p.name in asked.names]
        return take(pages, address, asked.out, "dark" if asked.dark else "light")


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


def take(pages: list[Page], address: str, out: Path, scheme: str) -> int:
    """Takes the pictures; an exception on a page is an error."""
    from playwright.sync_api import sync_playwright

    failed = 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        for page in pages:
            view = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
            view.goto(f"{address}/{page.path}")
            exception = view.locator('[data-testid="stException"]')
            view.get_by_text(re.compile(page.text)).or_(exception).first.wait_for(timeout=300_000)
            problems = exception.count() or settle(view, page.charts)
            path = out / f"{page.name}.png"
            # the page scrolls inside a container: a tall window shows all of it
            height = view.evaluate(_HEIGHT)
            view.set_viewport_size({"width": 1280, "height": min(int(height) + 20, 2400)})
            view.wait_for_timeout(1500)
            view.screenshot(path=str(path))
            size = path.stat().st_size
            verdict = "" if size <= MAX_BYTES else f"  LARGER THAN {MAX_BYTES // 1000} kB"
            print(f"{path}  {size // 1000} kB{verdict}", flush=True)
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
    sys.exit(main())
