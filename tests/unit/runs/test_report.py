"""`dray report`: one page about a run, or about several side by side, in whatever state their folders are."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

import browser
import command
import warm
from damage import RECORD
from dray.contract.findings import ConfigError, duration
from dray.facts import Facts
from dray.runs import metrics
from dray.runs.metrics import Startup
from dray.runs.prepare import read_recipe, write
from dray.runs.report import data, plots, sections
from dray.runs.report.data import gather
from dray.runs.report.plots import Series, Table, Text, TimeLine
from dray.runs.report.sections import Document, Item
from dray.runs.result import Attempt, Cause, Result
from dray.runs.store import RunPaths
from helpers import PYTHON, ROOT, bash_blocks, golden, section

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", home="/home/me"
)
BEGAN = 1_795_000_000.0
EVIL = '<script>alert(1)</script><img src=x onerror="alert(1)">\x1b[2J | `x` [a](javascript:alert(1)) \u202e'


def step(number: int, time: float, **more: object) -> dict[str, object]:
    """A line as the trainer writes it."""
    loss = 5 * math.exp(-number / 20) + 1
    speed = {"tokens_per_s": 1000.0 + number, "step_s": 2.0 + number / 100, "data_s": 0.0, "checkpoint_s": 0.0}
    own = {"memory_gb": 0.5 + number / 1000, "node_s": [0.3, 0.3 + number / 100]}
    return {
        "event": "step",
        "time": time,
        "step": number,
        "loss": loss,
        "lr": 0.004 * (1 - number / 100),
        **speed,
        **own,
        **more,
    }


def lines(paths: RunPaths, *events: dict[str, object]) -> None:
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))


def begin(runs: Path, name: str) -> RunPaths:
    paths = write(
        read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ("checkpoint.every=20",)), FACTS, runs=runs, run=name
    )[1]
    at = BEGAN if paths.attempt == 1 else BEGAN + 300
    os.utime(paths.plan, (at, at))
    parts = {"plan": 2.0, "srun": 1.0, "container": 3.0, "rendezvous": 2.0, "preflight": 10.0, "import": 15.0}
    nodes = [parts | {"model": 7.5, "first_step": 4.0}, {"container": 3.5, "rendezvous": 1.5, "import": 14.0}]
    (paths.folder / "startup.json").write_text(json.dumps({"attempt": paths.attempt, "nodes": nodes}))
    return paths


def start(at: float, first: int) -> dict[str, object]:
    return {
        "event": "start", "time": at + 40, "world_size": 4, "hosts": ["n1", "n1", "n2", "n2"], "parameters": 446080,
        "trainable_parameters": 446080, "first_step": first, "load_s": 2.5, "steps": 60, "device": "",
        "flops_per_token": 3069696.0, "imported": at + 30,
    }  # fmt: skip


def ended(paths: RunPaths, **more: object) -> None:
    told = {"run": paths.run.name, "status": "done", "exit_code": 0, "world_size": 4, "hosts": ["n1", "n2"], **more}
    paths.result.write_text(Result.model_validate(told).model_dump_json())


def resumed(runs: Path, name: str = "mine") -> Path:
    """A run whose first attempt lost a node after step 44, and whose second went on from step 40."""
    first = begin(runs, name)
    lines(
        first,
        start(BEGAN, 0),
        *(step(number, BEGAN + 40 + 4 * number, checkpoint_s=1.5 * (number == 20)) for number in range(1, 45)),
        {"event": "checkpoint", "time": BEGAN + 125, "checkpoint": 20, "saved": True, "seconds": 4.0},
        {"event": "checkpoint", "time": BEGAN + 205, "checkpoint": 40, "saved": True, "seconds": 3.0},
    )  # fmt: skip
    lost = RECORD | {
        "time": BEGAN + 220,
        "rank": None,
        "node": "n2",
        "code": 75,
        "why": "node 1 (n2) is gone\n  fix: x",
    }
    (first.failures / "node-1.json").write_text(json.dumps(lost))
    cause = Cause(node="n2", rank=None, code=75, why="node 1 (n2) is gone", log=None, last_lines=[])
    before = {"status": "failed", "exit_code": 75, "steps": 44, "first_step": 0}
    ended(first, finished="2026-11-18T11:10:25Z", cause=cause, **before)
    second = begin(runs, name)
    lines(
        second,
        start(BEGAN + 300, 40),
        *(step(number, BEGAN + 340 + 2 * (number - 40)) for number in range(41, 61)),
        {"event": "slow", "time": BEGAN + 370, "step": 55, "rank": 3, "node": "n2", "times": 1.41},
        {"event": "eval", "time": BEGAN + 381, "step": 60, "loss": 1.25, "perplexity": 3.4903, "accuracy": 0.5},
    )
    history = Attempt(attempt=1, why="node 1 (n2) is gone", status="failed", steps=44)
    ended(
        second, finished="2026-11-18T11:13:05Z", steps=60, first_step=40, perplexity=3.4903, history=[history],
        warnings=["the grace is short"],
    )  # fmt: skip
    return first.run


def told(*folders: Path) -> Document:
    return sections.document([gather(folder) for folder in folders], "Made by a test.")


def as_text(item: Item) -> str:
    """What a page says, without what it draws."""
    if isinstance(item, Text):
        return f"{item.style}: {item.text}" if item.style else item.text
    if isinstance(item, Table):
        return "\n".join([item.caption, *(" | ".join(row) for row in (item.head, *item.rows))])
    return item.alt


def test_the_whole_content(tmp_path: Path) -> None:
    made = told(resumed(tmp_path / "my runs"))
    blocks = [made.title, *map(as_text, made.lead)]
    for heading, items in made.sections:
        blocks += [f"## {heading}", *map(as_text, items)]
    golden("report.txt", "\n\n".join(blocks).replace(str(tmp_path), "/scratch/me") + "\n")


def test_a_start_that_was_measured(tmp_path: Path) -> None:
    """By the first node's clock, and by node; the ceiling of MFU, and what the attempts cost."""
    paths = begin(tmp_path, "mine")
    lines(paths, start(BEGAN, 0), step(1, BEGAN + 50))
    first = {"container": 2.0, "rendezvous": 4.0, "import": 20.0, "compile": 12.0, "first_step": 1.5, "tflops": 700.4}
    other = {"container": 5.5, "rendezvous": 0.5, "import": 22.0, "first_step": 0.25, "tflops": 612.3}
    told_by = {"attempt": 1, "nodes": [first, other]}
    (paths.folder / "startup.json").write_text(json.dumps(told_by))
    spent = {"node_hours": 1.5, "gpu_hours": 6.0}
    measured = metrics.read_startup(paths, ["n1", "n2"], 60.0)
    assert measured
    ended(paths, finished="2026-11-18T11:10:25Z", startup=measured.model_dump(), spent=spent)
    made = dict(told(tmp_path / "mine").sections)
    spans, _, nodes = made["Start-up"]
    assert isinstance(spans, TimeLine)
    assert isinstance(nodes, Table)
    assert [(span.name, span.took) for span in spans.rows[0][1]] == [
        ("container", "2.0 s"), ("rendezvous", "4.0 s"), ("launcher and imports", "20.0 s"),
        ("compile", "12.0 s"), ("first step", "1.5 s"),
    ]  # fmt: skip
    assert (nodes.caption, tuple(nodes.head)) == (
        "attempt 1: start-up of each node",
        ("node", "container", "rendezvous", "launcher and imports", "compile", "first step"),
    )
    assert nodes.rows == [
        ("n1", "2.0 s", "4.0 s", "20.0 s", "12.0 s", "1.5 s"),
        ("n2", "5.5 s", "500 ms", "22.0 s", "", "250 ms"),
    ]
    summary, attempts = as_text(made["Summary"][0]), as_text(made["Attempts and failures"][0])
    assert "\ncost, all attempts | 6.00 GPU-h\n" in summary
    assert "\nmeasured peak | 612 TFLOP/s on the slowest GPU (on n2)\n" in summary
    assert " | 1 to 1 | 60.0 s | " in attempts  # the queue


def test_of_a_long_file_some_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for checkpoints are summed whole, those for data are estimated, and the last step is shown."""
    paths = begin(tmp_path, "mine")
    steps = [step(n, BEGAN + n, data_s=0.1, checkpoint_s=2.0 if n % 50 == 0 else 0.0) for n in range(1, 501)]
    saves = [{"event": "checkpoint", "checkpoint": n, "saved": True, "seconds": 1.0} for n in range(50, 501, 50)]
    lines(paths, start(BEGAN, 0), *steps, *saves)
    whole = gather(tmp_path / "mine").trace
    monkeypatch.setattr(data, "READ_BYTES", paths.metrics.stat().st_size // 6)
    run = gather(tmp_path / "mine")
    some = run.trace
    assert (whole.every, some.every) == (1, 7)
    assert (len(whole.curves["loss"]), len(some.curves["loss"])) == (500, 80)
    assert (whole.steps, some.steps) == ({1: (1, 500)}, {1: (7, 500)})
    assert whole.checkpoint_s == some.checkpoint_s == 20.0
    assert (round(whole.data_s), round(some.data_s)) == (50, 50)
    assert len(some.events["checkpoint"]) == 10
    assert "one step in 7 was read" in sections.page(sections.document([run], ""))


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name in names]


KNOWN = {
    "html", "head", "meta", "title", "style", "body", "header", "nav", "main", "section", "footer", "h1", "h2", "p",
    "a", "ul", "ol", "li", "figure", "div", "span", "b", "i", "svg", "polyline", "path", "details",
    "figcaption", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


def checked(text: str) -> Page:
    """What every page must be: no script, nothing from elsewhere, and each part named for who does not see it."""
    page = Page(text)
    assert {name for name, _ in page.tags} <= KNOWN
    policy = next(one["content"] for one in page.named("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert not re.search(r"url\(|@import", text)
    assert not any("://" in (value or "") for _, attributes in page.tags for value in attributes.values())
    assert all(one["href"] and one["href"].startswith("#") for one in page.named("a"))
    assert not any(name.startswith("on") or name == "src" for _, attributes in page.tags for name in attributes)
    assert len(page.named("h1")) == len(page.named("title")) == 1
    assert len(page.named("table")) == len(page.named("caption"))
    assert all(one.get("scope") in ("row", "col") for one in page.named("th"))
    assert all(one["aria-label"] for one in page.named("div") if one.get("role") in ("img", "region"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {one["href"][1:] for one in page.named("a") if one["href"]} <= set(ids)
    return page


def test_the_html(tmp_path: Path) -> None:
    text = sections.page(told(resumed(tmp_path)))
    page = checked(text)
    assert len(page.named("figure")) == 7
    assert [one["class"] for one in page.named("polyline")].count("curve c0 d0") == 6
    assert "attempt 2 resumed at step 40" in page.text
    assert len(text) < 100_000


def test_several_runs(tmp_path: Path) -> None:
    page = checked(sections.page(told(resumed(tmp_path, "one"), resumed(tmp_path, "two"))))
    assert {"curve c0 d0", "curve c1 d0"} <= {one.get("class") for one in page.named("polyline")}
    assert "2 runs compared" in page.text
    assert "two: attempt 2: start-up of each node" in page.text


@pytest.mark.parametrize("which", ["two attempts of a run", "two copies of a run"])
def test_runs_of_one_name_are_told_apart(tmp_path: Path, which: str) -> None:
    run = resumed(tmp_path, "one")
    folders = (run / "attempt-1", run / "attempt-2")
    if which == "two copies of a run":
        folders = (run, resumed(tmp_path / "copy", "one"))
    page = checked(sections.page(told(*folders)))
    assert {"curve c0 d0", "curve c1 d0"} <= {one.get("class") for one in page.named("polyline")}
    legend = [f"one, attempt {n}" for n in (1, 2)] if "attempts" in which else [str(folder) for folder in folders]
    assert all(page.text.count(name) > 1 for name in legend)
    assert re.search(r"attempt \d, attempt", page.text) is None


def test_what_a_folder_says_is_only_text(tmp_path: Path) -> None:
    folder = resumed(tmp_path)
    paths = RunPaths(folder, 2)
    cause = Cause(node=EVIL, rank=3, code=1, why=EVIL, log=None, last_lines=[EVIL], fix=EVIL)
    (paths.failures / "rank-3.json").write_text(json.dumps(RECORD | {"time": BEGAN + 375, "why": EVIL, "node": EVIL}))
    lines(paths, {**start(BEGAN + 300, 40), "device": EVIL}, step(41, BEGAN + 350), step(42, BEGAN + 352),
          {"event": f"eval-{EVIL}", "step": 42, "loss": 1.0}, {"event": "slow", "rank": 1, "node": EVIL, "times": 2},
          {"event": "divergence", "time": BEGAN + 351, "kind": EVIL, "first_step": 41},
          {"event": "checkpoint", "checkpoint": 42, "saved": False, "why": EVIL})  # fmt: skip
    ended(paths, finished="x", status="failed", exit_code=1, cause=cause, warnings=[EVIL], hosts=[EVIL])
    document = told(folder)
    assert "alert(1)" in checked(sections.page(document)).text
    assert "\x1b" not in sections.page(document)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.34, "340 ms"),
        (0.9996, "1.0 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 39 s"),
        (120.0, "2 min"),
        (3725.0, "1 h 2 min"),
    ],
)
def test_a_time_reads_the_same_in_every_verb(seconds: float, text: str) -> None:
    assert plots.seconds(seconds) == text
    assert metrics.startup_text(Startup(parts={"queue": seconds})) == f"start-up: queue {text}"
    assert duration(seconds) == text or seconds < 99.95


def test_curves_are_reduced_and_lose_no_extreme() -> None:
    points = [(n, math.sin(n / 1000)) for n in range(100_000)]
    points[54_321], points[77_777] = (54_321, 40.0), (77_777, -40.0)
    found = plots.reduced(points)
    assert len(found) <= plots.MOST
    assert found == sorted(found)
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert {(54_321, 40.0), (77_777, -40.0)} <= {*found}
    assert len(plots.reduced(points[:1000])) == 1000


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1.7, 5.6], ["1", "2", "3", "4", "5", "6"]),
        ([0.0, 0.004], ["0.000", "0.001", "0.002", "0.003", "0.004"]),
        ([3.0, 3.0], ["1", "2", "3", "4", "5"]),
        ([0.0, 0.0], ["-0.5", "0.0", "0.5"]),
        ([1e-9, 5e-9], ["1e-09", "2e-09", "3e-09", "4e-09", "5e-09"]),
        ([-1e300, 1e300], None),
        ([5e-324, 1e-320], None),
    ],
)
def test_axes(values: list[float], labels: list[str] | None) -> None:
    made = plots.axis(min(values), max(values))
    assert all(0 <= made.share(value) <= 1 for value in values)
    if labels:
        assert [label for _, label in made.ticks] == labels


def test_the_numbers_of_several_curves_stand_beside_one_another() -> None:
    lines = plots.Lines(
        "Loss", "loss", [Series("a", [(1.0, 5.0), (2.0, 4.0)], "c0 d0"), Series("b", [(2.0, 7.0)], "c1 d0")]
    )
    assert [*filter(None, lines.places)] == [(1.0, [5.0, None]), (2.0, [4.0, 7.0])]
    page = Page(sections.page(Document("x", [], [("Loss", [lines])], "")))
    assert ("step 1: a 5.000" in page.text, "step 2: a 4.0000 b 7.0000" in page.text) == (True, True)


def dray(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return command.dray("report", *words, cwd=cwd)


@pytest.mark.seconds
def test_the_verb(tmp_path: Path) -> None:
    folder = resumed(tmp_path / "runs")
    made = dray(cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == f"report: {tmp_path}/dray-report-mine.html\n"
    checked((tmp_path / "dray-report-mine.html").read_text())
    refused = dray(folder, "--out", "none/x.html", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (78, "")
    assert refused.stderr.startswith("dray: the report cannot be written\n")


@pytest.mark.seconds
@pytest.mark.hostile("report")
def test_what_is_no_page_stays(tmp_path: Path) -> None:
    folder = resumed(tmp_path / "runs")
    (tmp_path / "recipe.toml").write_text("# mine\n")
    refused = dray(folder, "--out", "recipe.toml", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (78, "dray: a report is a page of HTML")
    assert (tmp_path / "recipe.toml").read_text() == "# mine\n"


@pytest.mark.seconds
def test_a_report_is_replaced(tmp_path: Path) -> None:
    folder = resumed(tmp_path / "runs")
    for _ in range(2):
        assert dray(folder, "--out", "one.html", cwd=tmp_path).stdout == f"report: {tmp_path}/one.html\n"
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "link.html").symlink_to("train.py")
    assert dray(folder, "--out", "link.html", cwd=tmp_path).returncode == 0
    assert (tmp_path / "train.py").read_text() == "mine"


@pytest.mark.seconds
def test_the_commands_of_its_page(tmp_path: Path) -> None:
    folder = resumed(tmp_path)
    block = bash_blocks(section("runs.md", "## Report"))
    program = warm.program(tmp_path / "bin" / "dray")
    env = {
        **PYTHON,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "RUN": str(folder),
        "OTHER": str(folder / "attempt-1"),
    }
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=60)
    assert {"dray-report-mine.html", "compared.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("words", [{"to": ["mlflow"]}, {"follow": True}, {"sync": True, "out": Path("x.html")}])
def test_options_of_sync(words: dict[str, object]) -> None:
    from dray.cli.report import report

    with pytest.raises(ConfigError, match="--to and --follow belong to --sync, and --out does not"):
        report(Mock(), **words)


@pytest.mark.seconds
@pytest.mark.chromium
def test_in_a_browser(tmp_path: Path) -> None:
    """On a phone and on a desk, in light and in dark: all is drawn, nothing is cut off, overlaps or is too faint."""
    page = tmp_path / "page.html"
    page.write_text(sections.page(told(resumed(tmp_path / "runs", "one"), resumed(tmp_path / "runs", "two"))))
    for dark in (False, True):
        for found in browser.measured(page, (360, 1440), tmp_path, dark=dark):
            assert found["scrolls"] == found["wide"]
            assert (found["clipped"], found["overlap"], found["faint"]) == ([], [], [])
            assert len(found["drawn"]) == 7
            assert all(width > 2 and height > 0 for _, width, height in found["drawn"])
            assert all(width > found["wide"] / 2 for title, width, _ in found["drawn"] if title == "Training loss")
