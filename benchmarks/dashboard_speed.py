"""How fast the dashboard answers: first page after the server is up, and a change, for K2.

    .venv/bin/python benchmarks/dashboard_speed.py [--repeats N]

Needs Chromium and playwright (see scripts/screenshots.py). A change is another cluster, which
no cache has seen; its time runs until the new verdict and the new charts stand on the page.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import screenshots

K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"
CLUSTERS = ("1024_h100", "16384_h100", "576_gb200_nvl72")
WAIT_MS = 120_000


def main() -> int:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="servers started anew")
    repeats = parser.parse_args().repeats
    missing = screenshots.missing_tools()
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    first: list[float] = []
    changes: list[float] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=screenshots.chromium(), args=list(screenshots.FLAGS)
        )
        for _ in range(repeats):
            with screenshots.server() as address:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.set_default_timeout(WAIT_MS)
                begin = time.perf_counter()
                page.goto(f"{address}/?scenario={K2}")
                verdict(page, "kimi_k2 on 2,048")
                first.append(time.perf_counter() - begin)
                print(f"first page: {first[-1]:.2f} s", file=sys.stderr)
                for cluster in CLUSTERS:
                    changes.append(change(page, cluster))
                    print(f"{cluster}: {changes[-1]:.2f} s", file=sys.stderr)
                page.close()
        browser.close()
    spread = {"first_page_s": [min(first), max(first)], "change_s": [min(changes), max(changes)]}
    print(
        json.dumps(
            {
                "first_page_s": statistics.median(first),
                "change_s": statistics.median(changes),
                "change_max_s": max(changes),
                "changes": len(changes),
                "machine": f"{platform.machine()}, {platform.processor() or 'cpu'}",
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "repeats": repeats,
                "spread": spread,
            }
        )
    )
    return 0


def verdict(page: Any, text: str) -> None:
    """Waits until a verdict with the text and the charts under it stand on the page."""
    page.get_by_text(re.compile(f"(fits|tight|does not fit).*{re.escape(text)}")).first.wait_for()
    page.locator(".js-plotly-plot").first.wait_for()


def change(page: Any, cluster: str) -> float:
    """Returns the seconds from the press of the button to the new verdict."""
    gpus, name = cluster.split("_", 1)
    page.get_by_role("combobox", name=re.compile("Cluster")).first.click()
    page.get_by_role("option", name=cluster, exact=True).click()
    begin = time.perf_counter()
    page.get_by_role("button", name="Plan", exact=True).click()
    verdict(page, f"kimi_k2 on {int(gpus):,} x {name.split('_')[0]}")
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
