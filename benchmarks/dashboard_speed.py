"""How fast the dashboard answers: first page after the server is up, and a change, for K2.

    .venv/bin/python benchmarks/dashboard_speed.py [--repeats N]

Needs Chromium and playwright (see scripts/screenshots.py). A change is another cluster, which
no cache has seen; its time runs from the press of the button until the new verdict, the table
of plans and all three charts of it stand on the page. Beside the times stand the CPU seconds
of the server and of the browser, each with its processes (Linux only): on a noisy machine
those say more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import screenshots

K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"
CLUSTERS = ("1024_h100", "16384_h100", "576_gb200_nvl72")
WAIT_MS = 120_000
CHARTS = 3
# Charts that are drawn and not of an older answer.
_STANDS = """([words, charts]) => {
  const fresh = e => !e.closest('[data-stale="true"]');
  const verdicts = [...document.querySelectorAll('[data-testid="stAlert"]')].filter(fresh);
  const drawn = [...document.querySelectorAll('.js-plotly-plot .main-svg')].filter(fresh);
  const plots = new Set(drawn.map(e => e.closest('.js-plotly-plot')));
  const tables = [...document.querySelectorAll('.stMarkdown table, .stDataFrame canvas')];
  return verdicts.some(e => e.textContent.includes(words)) && plots.size >= charts
    && tables.some(fresh);
}"""


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

    rows: dict[str, list[dict[str, float]]] = {"start": [], "first_page": [], "change": []}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=screenshots.chromium(), args=list(screenshots.FLAGS)
        )
        for _ in range(repeats):
            begin = time.perf_counter()
            with screenshots.server() as address:
                rows["start"].append({"wall_s": time.perf_counter() - begin})
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.set_default_timeout(WAIT_MS)
                rows["first_page"].append(timed(lambda p=page, a=address: first_page(p, a)))
                print("first page", rows["first_page"][-1], file=sys.stderr)
                for cluster in CLUSTERS:
                    press = chosen(page, cluster)
                    rows["change"].append(timed(press))
                    print(cluster, rows["change"][-1], file=sys.stderr)
                page.close()
        browser.close()
    print(
        json.dumps(
            {
                **{name: told(found) for name, found in rows.items()},
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "load": os.getloadavg()[0],
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "repeats": repeats,
            }
        )
    )
    return 0


def told(found: list[dict[str, float]]) -> dict[str, Any]:
    """Returns median, least and most of each figure, in seconds."""
    out: dict[str, Any] = {}
    for name in found[0]:
        values = [row[name] for row in found]
        middle, least, most = statistics.median(values), min(values), max(values)
        out[name] = {
            k: round(v, 2) for k, v in (("median", middle), ("min", least), ("max", most))
        }
    return out


def timed(act: Callable[[], None]) -> dict[str, float]:
    """Returns wall seconds of an action, and CPU seconds of server and browser meanwhile."""
    before, begin = cpu_seconds(), time.perf_counter()
    act()
    wall, after = time.perf_counter() - begin, cpu_seconds()
    return {
        "wall_s": round(wall, 2),
        **{f"{k}_cpu_s": round(after[k] - before.get(k, 0.0), 2) for k in after},
    }


def cpu_seconds() -> dict[str, float]:
    """Returns CPU seconds used so far by this script's children, by what they are.

    "search" is the server's worker, which yields to everything else.
    """
    parents, used, words = {}, {}, {}
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            words[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / ticks
    out = {"server": 0.0, "search": 0.0, "browser": 0.0}
    for process in used:
        above = process
        while above not in {0, 1, os.getpid()}:
            above = parents.get(above, 0)
        if above == os.getpid() and process != above:
            text = words[process]
            kind = "search" if "dashboards.worker" in text else "browser"
            kind = "server" if "dashboards.serve" in text else kind
            if kind != "browser" or "chrom" in text:
                out[kind] += used[process]
    return out


def first_page(page: Any, address: str) -> None:
    """Opens the page and waits for its verdict and charts."""
    page.goto(f"{address}/?scenario={K2}")
    stands(page, "kimi_k2 on 2,048")


def stands(page: Any, words: str) -> None:
    """Waits for a verdict with the words and its charts; looks twenty times a second."""
    page.wait_for_function(_STANDS, arg=[words, CHARTS], polling=50)


def chosen(page: Any, cluster: str) -> Callable[[], None]:
    """Chooses the cluster; returns what presses the button and waits for the new answer.

    Where the button is is looked up before: to find it by its name takes the browser a while.
    """
    gpus, name = cluster.split("_", 1)
    page.get_by_role("combobox", name=re.compile("Cluster")).first.click()
    page.get_by_role("option", name=cluster, exact=True).click()
    button = page.get_by_role("button", name="Plan", exact=True)
    button.scroll_into_view_if_needed()
    box = button.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    words = f"kimi_k2 on {int(gpus):,} x {name.split('_')[0]}"

    def press() -> None:
        page.mouse.click(x, y)
        stands(page, words)

    return press


if __name__ == "__main__":
    sys.exit(main())
