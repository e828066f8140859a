"""What a person sees: the terminal, the page in a real browser without a network, the picture, TensorBoard itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import curve_assets as assets
import pytest

from atlasrl.curves import aliases, overlay, page, picture, report, rules
from atlasrl.curves.curve import Attempt
from atlasrl.curves.judge import judge
from atlasrl.errors import UsageFault

RULES = rules.load()
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
BROWSER = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --window-size=1360,1500
    --enable-logging=stderr --virtual-time-budget=2000
"""


def verdict_and_data(name="npu", speed=0.6):
    candidate = assets.dapo_run(9, speed=speed, name=name)
    candidate.attempts = [Attempt("1", 1, 120, 0), Attempt("2", 101, 200, 0)]
    seeds = [assets.dapo_run(seed, name=f"gpu-{seed}") for seed in (1, 2, 3)]
    verdict = judge([candidate], seeds, RULES)
    return verdict, report.data(verdict, [candidate], seeds, RULES)


def test_the_table_fits_a_terminal_and_names_what_failed_first():
    verdict, _ = verdict_and_data()
    text = report.text(verdict, details=True)
    assert max(map(len, text.splitlines())) <= 100
    first, finding = verdict.failures()[0]
    assert f"first {first.metric} ({finding.check}) from step {finding.first_step}" in text.replace("\n", " ")
    assert "mean |c - b|" in text and "ROLL#99" in text


def test_the_page_asks_for_nothing_and_foreign_names_stay_text():
    """A run or tag may be called anything; on the page it is data, never markup, and never ends the script."""
    evil = "</script><img src=x onerror=alert(1)>"
    _, data = verdict_and_data(name=evil)
    html = page.html(data)
    assert evil not in html and "<img" not in html and html.count("</script>") == 2
    around = re.sub(r'<script id="report".*?</script>', "", html, flags=re.DOTALL)
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'> ]+)""", around) == ["data:,", "#${clip})`"]
    assert "default-src 'none'" in html


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The page opened in Chromium with a hostile name: its final DOM, and what the console said."""
    if CHROMIUM is None:
        pytest.fail("no Chromium on this machine; apt-get install chromium")
    folder = tmp_path_factory.mktemp("page")
    _, data = verdict_and_data(name="npu</script><b id=evil>")
    file = folder / "report.html"
    file.write_text(page.html(data))
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    command = [CHROMIUM, *BROWSER.split(), *offline, "--dump-dom", f"file://{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.browser
def test_the_page_shows_its_curves_in_a_browser_without_network_or_console_error(opened):
    dom, console = opened
    assert console == []
    charts = re.findall(r"<svg.*?</svg>", dom, re.S)
    assert len(charts) == 5
    for chart in charts:
        curves = re.findall(r'class="smooth"[^>]* d="(M[^"]+)"', chart)
        assert len(curves) == 4  # one candidate, three seeds
        assert all(curve.count("L") == 199 for curve in curves)
        assert 'class="band"' in chart and chart.count('class="attempt"') == 1
    assert "fails from" in dom and "not aligned" in dom


@pytest.mark.browser
def test_a_hostile_run_name_makes_no_element(opened):
    dom, _ = opened
    body = dom.replace(re.search(r'<script id="report".*?</script>', dom, re.S)[0], "")
    assert 'id="evil"' not in body and "<b id=evil>" not in body and "npu&lt;/script&gt;" in body


@pytest.mark.browser
def test_the_picture_is_a_png_of_a_few_hundred_kilobytes(tmp_path):
    _, data = verdict_and_data(name="cost $5 and $6")
    picture.png(data, tmp_path / "report.png")
    content = (tmp_path / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG") and 20_000 < len(content) < 2_000_000
    assert int.from_bytes(content[16:20]) == 1500


def served(logdir: Path):
    """TensorBoard on a free port of the loopback address; yields a function that asks its HTTP API."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    return subprocess.Popen(
        [*command, "--load_fast", "false"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def ask(base: str, path: str) -> object:
    with urllib.request.urlopen(f"{base}{path}", timeout=30) as answer:
        return json.load(answer)


@pytest.mark.browser
def test_tensorboard_lists_all_runs_under_shared_tags_and_shows_the_layout(tmp_path):
    candidate = assets.dapo_run(9, name="npu/1")
    other = assets.dapo_run(2, name="trl")
    renamed = {"train/reward": other.curves["critic/rewards/mean"], "train/entropy": other.curves["actor/entropy"]}
    other.curves = renamed
    metrics = {name: aliases.known()[name] for name in ("reward", "entropy")}
    names = overlay.write(tmp_path / "overlay", [candidate], [other], metrics)
    server = served(tmp_path / "overlay")
    try:
        base = next(m[1] for line in server.stderr if (m := re.search(r"(http://127\.0\.0\.1:\d+)", line)))
        deadline = time.monotonic() + 60
        while True:
            tags = ask(base, "/data/plugin/scalars/tags")
            layout = ask(base, "/data/plugin/custom_scalars/layout")
            if (set(tags) == set(names) and layout) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert {run: sorted(found) for run, found in tags.items()} == {name: ["entropy", "reward"] for name in names}
        assert [chart["title"] for chart in layout["category"][0]["chart"]] == ["Reward", "Entropy"]
        values = ask(base, f"/data/plugin/scalars/scalars?run={names[1]}&tag=reward")
        expected = candidate.curves["critic/rewards/mean"].values
        assert [step for _, step, _ in values] == list(range(1, 201))
        assert [value for _, _, value in values] == pytest.approx(expected, rel=1e-6)
    finally:
        server.terminate()
        server.wait(20)


def test_an_overlay_is_never_mixed_with_other_runs(tmp_path):
    (tmp_path / "foreign").write_text("")
    with pytest.raises(UsageFault, match="is not empty"):
        overlay.write(tmp_path, [assets.dapo_run(1)], [], aliases.known())


def test_runs_of_the_same_name_get_folders_of_their_own(tmp_path):
    runs = [assets.dapo_run(1, steps=5, name="a/b"), assets.dapo_run(2, steps=5, name="a:b")]
    names = overlay.write(tmp_path / "o", runs, [], {"reward": aliases.known()["reward"]})
    assert names == ["candidate-a-b", "candidate-a-b-2"]
