"""The command line. Only the file of the verb on the line is imported: help and version import none."""

from __future__ import annotations

import os
import sys

from dray import __version__
from dray.cli import streams
from dray.contract import exit_codes, failures, secrets
from dray.contract.findings import ConfigError, DrayError, nearest

# In the order of a day, as `dray --help` shows them. Each line is the beginning of the verb's own help.
VERBS = {
    "Prepare": {
        "init": "Write a folder from which you build images and submit jobs",
        "doctor": "Check whether runs can start on this machine or node",
        "image": "Build, adopt, extend, inspect and verify images",
        "recipe": "List, write and check recipes, and list their keys",
        "site": "List, show, check and write the site files of clusters",
        "data": "Show a recipe's datasets as its model will see them, or download them",
    },
    "Start a run": {
        "plan": "Print in ten lines what would run, without starting it",
        "run": "Run a recipe or a command on this machine",
        "submit": "Check the recipe, make the run folder and call sbatch",
    },
    "Watch and stop a run": {
        "runs": "List runs, the newest first",
        "status": "Show the state of a run",
        "top": "Watch a run live: progress, loss, speed, nodes and last lines",
        "logs": "Show the logs of all nodes and ranks",
        "watch": "Watch a run from outside its job",
        "stop": "Ask a run to save a checkpoint and end",
        "enter": "Open a shell, or run a COMMAND, in the container of a run",
    },
    "After a run": {
        "why": "Show why a run failed: the first failure, its cause and the fix",
        "report": "Write a report of a run, or of several side by side",
        "diff": "Show what differs between two runs, the most important first",
        "replay": "Repeat a run with the same recipe, nodes and ranks",
        "model": "Evaluate, export, push or import a model, or generate text with it",
    },
    "Several runs and machines": {
        "study": "Run one recipe several times, and compare: sweep, scale and tune",
        "remote": "Name clusters that you reach by ssh, for --on NAME",
        "clean": "Show old runs and tokens of datasets; with --yes remove them",
    },
}
HIDDEN = {
    "cluster": "A real Slurm with Apptainer on this machine, in Docker",
    "completion": "Print a script with which your shell completes",
    "finish": "",  # slurm/end.sh calls it
}
SHOWN = {verb: line for panel in VERBS.values() for verb, line in panel.items()}
WITH_COMMAND = ("plan", "run", "submit", "enter")
"""These verbs may end in -- and a command, whose arguments dray does not parse."""


def main() -> None:
    """Run one verb. A failure is printed without a traceback, and ends with an exit code of contract.exit_codes."""
    argv = sys.argv[1:]
    streams.join_login_node()
    streams.begin()
    code = _code(argv)
    # `finish` exits with the job's code, whatever becomes of its output.
    if argv[:1] != ["finish"] and (refusal := streams.refusal()):
        code = code or _say(refusal)
    raise SystemExit(code)


def _code(argv: list[str]) -> int:
    try:
        if argv[:1] != ["finish"]:
            streams.require(argv)
        if "_DRAY_COMPLETE" in os.environ:
            from dray.cli import completion  # only a TAB needs it

            return completion.answer()
        word = argv[0] if argv else ""
        if word in ("", "-h", "--help"):
            print(_help())
            return exit_codes.DONE if word else exit_codes.CONFIG
        if word == "--version":
            print(f"dray {__version__}")
            return exit_codes.DONE
        if word not in SHOWN | HIDDEN:
            raise ConfigError(f"dray has no verb {word!r}", fix=f"dray {nearest(word, SHOWN) or '-h'}")
        from dray.cli import app  # typer takes 0.1 s

        return app.run(argv)
    except Exception as raised:
        return _say(failures.unexpected_error(raised))


def _help() -> str:
    lines = [
        "Usage: dray VERB [OPTIONS]     dray VERB -h explains a verb     dray --version\n",
        "Build or adopt one container image, and train in it on the nodes of a cluster.",
    ]
    for panel, verbs in VERBS.items():
        lines.append(f"\n{panel}:")
        lines += [f"  {verb:<8}{line}" for verb, line in verbs.items()]
    lines.append("\nAlso: dray cluster (a Slurm on this machine), dray completion (in your shell)")
    lines.append(
        "\nExamples:\n  dray init my-runs\n  dray run recipes/smoke-cpu.toml\n  dray submit recipes/mine.toml -N 2"
    )
    return "\n".join(lines)


def _say(error: DrayError) -> int:
    print(f"dray: {secrets.redacted(str(error))}", file=sys.stderr, flush=True)
    return error.finding.code
