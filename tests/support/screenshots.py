"""`screenshots.py SITE OUT`: pictures of the site, a report and the terminal, from a run of their own."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI
from rich.text import Text

import browser
from dray.cli.runs import live_screen
from dray.runs.status import Watched

ROOT = Path(__file__).resolve().parents[2]
DRAY = (sys.executable, "-m", "dray")
_ALONE_S, _STEP = 900, 100  # until the run has made that many steps, also on a slow machine
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # of a host that the reader has not asked


def terminal(typed: str, shown: RenderableType, picture: Path) -> None:
    """A terminal of 120 columns as SVG, light and dark."""
    for scheme, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", DIMMED_MONOKAI)):
        console = Console(record=True, width=120, file=io.StringIO(), force_terminal=True, highlight=False)
        console.print(Text(f"$ {typed}", style="bold"))
        console.print(shown)
        drawn = console.export_svg(title=typed, theme=theme, unique_id=picture.stem)
        picture.with_name(f"{picture.name}-{scheme}.svg").write_text(_FONTS.sub("", drawn), encoding="utf-8")


def live(out: Path, runs: Path) -> Path:
    """Train the demo's recipe, and draw `dray top` in the midst of it; the run."""
    argv = (*DRAY, "run", "recipes/smoke-cpu.toml", "--runs", str(runs))
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL) as training:
        try:
            deadline = time.monotonic() + _ALONE_S
            while not (run := next((one for one in runs.glob("*") if (one / "attempt-1").is_dir()), None)):
                _wait(training, deadline)
            watched = Watched(run)
            while ((seen := watched.look(closely=True)).step or 0) < _STEP:
                _wait(training, deadline)
            terminal("dray top", live_screen(seen), out / "top")
            if training.wait(timeout=_ALONE_S):
                sys.exit("the run failed: .venv/bin/dray why")
        finally:
            training.terminate()
    return run


def _wait(training: subprocess.Popen[bytes], deadline: float) -> None:
    if training.poll() is not None or time.monotonic() > deadline:
        sys.exit("the run ended before its picture was taken: make demo shows why")
    time.sleep(0.2)


def printed(*argv: str) -> Text:
    """What a verb prints."""
    ended = subprocess.run((*DRAY, *argv), cwd=ROOT, capture_output=True, text=True, check=True)
    return Text.from_ansi(ended.stdout)


def main(site: Path, out: Path) -> None:
    """All of them into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="dray-screenshots-") as folder:
        run, report = live(out, Path(folder, "runs")), Path(folder, "report.html")
        terminal("dray runs", printed("runs", "--runs", str(run.parent)), out / "runs")
        printed("report", str(run), "--out", str(report))
        for name, page, width, height in (
            ("start-1440", site / "start.html", 1440, 1000),
            ("train-360", site / "train.html", 360, 1400),
            ("report-1440", report, 1440, 2200),
            ("report-360", report, 360, 3200),
        ):
            for dark in (False, True):
                picture = out / f"{name}-{'dark' if dark else 'light'}.png"
                browser.screenshot(page, picture, width, height, Path(folder), dark=dark)
        # What README shows is a copy: docs/pictures/report.png.
        browser.screenshot(report, out / "report-readme.png", 800, 1000, Path(folder), tops=(0, 1000))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tests/support/screenshots.py SITE OUT")
    if not browser.program():
        sys.exit("there is no Chromium (Debian: apt-get install chromium-headless-shell)")
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    print("\n".join(map(str, sorted(Path(sys.argv[2]).glob("*-*.*")))))
