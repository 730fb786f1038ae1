"""The dashboard in a real browser: explore, change, open a plan, export, compare, reload."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
screenshots = pytest.importorskip("screenshots")

from flopwright.spec.load import dump_yaml, load_plan, load_scenario  # noqa: E402

MINI = "kimi_k2_mini_2cpu_fp32"
K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"
OWN_BOX = "Your own scenario, model or cluster"
WAIT_MS = 240_000
# Nine levels of nine aliases each: written out, 387 million values.
BOMB = "\n".join(
    f"l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'x'] * 9)}]" for i in range(9)
).encode()
pytestmark = pytest.mark.slow


def need_browser() -> None:
    missing = screenshots.missing_tools()
    if not missing:
        return
    text = "needs a browser:\n" + "\n".join(missing)
    if os.environ.get("FLOPWRIGHT_REQUIRE_SERVICES"):
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with one real run of the mini model in its store."""
    need_browser()
    folder = tmp_path_factory.mktemp("home")
    environment = os.environ | {"FLOPWRIGHT_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("FLOPWRIGHT_STORE", None)

    def run(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "flopwright", *words],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]

    run("plan", MINI, "--zero", "1", "--out", "plan.yaml")
    run("run", "plan.yaml", "--steps", "6", "--out", "run")
    return folder


@pytest.fixture(scope="module")
def view(home: Path) -> Iterator[Any]:
    """A browser page on a dashboard that serves that folder's store."""
    from playwright.sync_api import sync_playwright

    before = dict(os.environ)
    os.environ["FLOPWRIGHT_HOME"] = str(home)
    os.environ.pop("FLOPWRIGHT_STORE", None)
    try:
        with screenshots.server() as address, sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=screenshots.chromium(), args=list(screenshots.FLAGS)
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1000}, base_url=address)
            page.set_default_timeout(WAIT_MS)
            yield page
            browser.close()
    finally:
        os.environ.clear()
        os.environ.update(before)


def shown(view: Any, pattern: str) -> Any:
    """Waits for a text; an exception on the page fails at once."""
    exception = view.locator('[data-testid="stException"]')
    text = view.get_by_text(re.compile(pattern))
    text.or_(exception).first.wait_for()
    assert not exception.count(), exception.first.inner_text()
    return text.first


def drawn(view: Any, charts: int) -> None:
    view.locator(".js-plotly-plot").nth(charts - 1).wait_for()


def settled(view: Any, charts: int) -> None:
    """Waits until the charts stand and nothing is computed any more."""
    assert screenshots.settle(view, charts) == 0


def choose(view: Any, label: str, option: str) -> None:
    view.get_by_role("combobox", name=re.compile(label)).first.click()
    view.get_by_role("option", name=option, exact=True).click()


def test_from_exploring_to_a_bundle(view: Any, tmp_path: Path) -> None:
    view.goto(f"/?scenario={K2}")
    shown(view, r"fits: kimi_k2 on 2,048")
    drawn(view, 3)
    # change the cluster: the address and the command line follow
    choose(view, "Cluster", "1024_h100")
    view.get_by_role("button", name="Plan", exact=True).click()
    shown(view, r"kimi_k2 on 1,024 x h100")
    assert "set=cluster%3D1024_h100" in view.url
    shown(view, r"--set")
    # the search of every plan is stopped: the first look stays, and its plan can be opened
    view.get_by_role("button", name="Stop").click()
    view.get_by_role("button", name="Search every plan").wait_for()
    settled(view, 3)  # a click while the page is drawn anew would be lost
    view.get_by_role("button", name="Open this plan in depth").click()
    shown(view, r"Download plan.yaml")
    assert "/plan?" in view.url
    assert "plan=" in view.url
    settled(view, 1)
    with view.expect_download() as download:
        view.get_by_role("button", name="Download plan.yaml").click()
    file = tmp_path / "plan.yaml"
    download.value.save_as(file)
    plan = load_plan(file)
    # reload from the address: the same plan
    view.reload()
    shown(view, re.escape(plan.parallel.label()))
    # the link to another page takes the scenario and the plan along
    settled(view, 1)
    view.get_by_role("link", name="Export").click()
    shown(view, r"each read back and found sound")
    query = view.url.split("?", 1)[1]
    assert "set=cluster%3D1024_h100" in query
    view.goto(f"/export?{query}&target=skypilot")
    shown(view, r"each read back and found sound")
    settled(view, 0)
    with view.expect_download() as download:
        view.get_by_role("button", name=re.compile("Download the bundle")).click()
    with zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes())) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (tmp_path / "again.yaml").write_bytes(files["plan.yaml"])
    assert load_plan(tmp_path / "again.yaml").parallel == plan.parallel
    assert json.loads(files["deepspeed.json"])["zero_optimization"]
    task = next(name for name in files if "skypilot" in name or name.startswith("sky"))
    assert yaml.safe_load(files[task])["num_nodes"] == plan.parallel.world_size // 8 == 128


def test_a_search_ends_by_itself(view: Any) -> None:
    """The first look gives way to the best of every plan, without a click."""
    view.goto(f"/?scenario={MINI}")
    shown(view, r"fits: kimi_k2_mini.*exhaustive")
    drawn(view, 3)
    assert not view.get_by_role("button", name="Stop").count()
    # a tab is part of the address
    view.get_by_role("tab", name="What holds it back").click()
    shown(view, r"had no limit")
    assert "tab=What" in view.url
    view.reload()
    shown(view, r"had no limit")
    drawn(view, 1)


def test_a_real_run_is_compared(view: Any) -> None:
    view.goto("/compare")
    shown(view, r"1 run in ")
    drawn(view, 2)
    shown(view, r"median error")
    view.get_by_role("tab", name="One run").click()
    view.get_by_text(re.compile("Look first at")).first.wait_for()
    view.get_by_role("tab", name="Runs", exact=True).click()
    before = view.url
    view.reload()
    shown(view, r"1 run in ")
    assert view.url == before


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "scenario/big.yaml",
            b"# " + b"x" * 10_000_000,
            r"must be 1\.0MB or smaller|too large|exceeds",
        ),
        ("scenario/bomb.yaml", BOMB, r"alias"),
        ("scenario/wrong.yaml", b"name: 5\nmodel: [1]\nworkload: none\n", r"cannot be planned"),
        ("scenario/m.yaml", b"name: x\nmodel: none_such\ncluster: 8_h100\n", r"no such model"),
        ("scenario/zip.yaml", b"PK\x03\x04\xff\xfe" * 50, r"not UTF-8"),
        ("model/config.json", b'{"model_type": "none_such"}', r"no such architecture"),
        ("cluster/cluster.yaml", b"name: .nan\nnode: 1e999\n", r"cannot be planned"),
    ],
)
def test_a_hostile_upload_is_refused_and_the_session_goes_on(
    view: Any, name: str, content: bytes, words: str
) -> None:
    view.goto(f"/?scenario={MINI}")
    shown(view, r"fits: kimi_k2_mini")
    settled(view, 3)
    upload(view, name, content)
    shown(view, words)
    # the same session goes on: without the file the page plans again, and what is changed counts
    view.evaluate("window.sameSession = true")
    view.locator('[data-testid="stFileChipDeleteBtn"]').first.click()
    view.get_by_text(re.compile(words)).wait_for(state="detached")
    shown(view, r"fits: kimi_k2_mini")
    settled(view, 3)
    choose(view, "Make least", "headroom")
    view.get_by_role("button", name="Plan", exact=True).click()
    shown(view, r"--set objective=headroom")
    shown(view, r"fits: kimi_k2_mini")
    assert "set=objective%3Dheadroom" in view.url
    assert view.evaluate("window.sameSession") is True


def upload(view: Any, name: str, content: bytes) -> None:
    """Opens the box and gives it a file: name is WHAT/FILE, what being one of its three places."""
    what, _, file = name.partition("/")
    view.get_by_text(OWN_BOX, exact=True).click()
    fields = view.locator('[data-testid="stFileUploader"] input[type="file"]')
    fields.nth(2).wait_for(state="attached")
    place = fields.nth(("scenario", "model", "cluster").index(what))
    place.set_input_files({"name": file, "mimeType": "", "buffer": content})


def test_a_file_counts_though_its_box_is_closed_at_once(view: Any) -> None:
    view.goto(f"/?scenario={MINI}")
    shown(view, r"fits: kimi_k2_mini")
    settled(view, 3)
    scenario = load_scenario(MINI).model_copy(update={"name": "mine_closed_at_once"})
    upload(view, "scenario/mine.yaml", dump_yaml(scenario).encode())
    view.get_by_text(OWN_BOX, exact=True).click()
    shown(view, r"mine\.yaml, uploaded")
    shown(view, r"flopwright plan mine_closed_at_once\.yaml")


def test_dark_mode_is_readable(view: Any) -> None:
    """Text and background differ enough in both schemes (WCAG contrast of 4.5)."""
    for scheme in ("light", "dark"):
        view.emulate_media(color_scheme=scheme)
        view.goto(f"/?scenario={MINI}")
        shown(view, r"fits: kimi_k2_mini")
        colours = view.evaluate(
            """() => { const e = document.querySelector('[data-testid="stApp"]');
                 const s = getComputedStyle(e); return [s.color, s.backgroundColor]; }"""
        )
        assert contrast(*colours) >= 4.5, (scheme, colours)
    view.emulate_media(color_scheme="light")


def contrast(first: str, second: str) -> float:
    """The contrast of two CSS colours, as WCAG 2 defines it."""

    def luminance(text: str) -> float:
        parts = [int(float(p)) / 255 for p in re.findall(r"[\d.]+", text)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)
