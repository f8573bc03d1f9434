"""The command line: one file for each verb."""

from __future__ import annotations

import importlib
import sys

import typer
from typer.exceptions import TyperException

from dray import __version__
from dray.cli import completion, examples, usage
from dray.cli.streams import Streams, require, settle, silence
from dray.contract import exit_codes, secrets, unexpected
from dray.contract.findings import DrayError

app = typer.Typer(
    name="dray",
    help="Build or adopt one container image, and train in it on the nodes of a Slurm cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,  # dray completion
    epilog="Examples:\n  dray init my-runs\n  dray run recipes/smoke-cpu.toml\n  dray submit recipes/mine.toml -N 2",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        print(f"dray {__version__}")
        raise typer.Exit


# In the order of their use, as `dray --help` shows them.
_PANELS = {
    "Start a run": ("init", "plan", "prefetch", "run", "submit", "scale", "sweep", "tune"),
    "Watch and stop a run": ("runs", "status", "logs", "top", "stop", "enter", "jupyter", "finish"),
    "After a run": ("why", "report", "diff", "replay", "capsule"),
    "The model": ("eval", "generate", "export", "push", "model", "checkpoint"),
    "Recipes, images, datasets and sites": ("recipe", "image", "data", "site", "env"),
    "This machine": ("doctor", "remote", "cluster", "clean", "completion"),
}
_OF_MODEL = {"eval": "evaluate", "generate": "generate", "export": "export", "push": "push"}
# These may end in -- and a command, whose arguments dray does not parse.
_START = ("plan", "run", "submit", "enter", "env")
_GROUPS = ("capsule", "recipe", "image", "cluster", "site", "env", "model", "checkpoint", "data", "remote")
_EVERYTHING = tuple(name for names in _PANELS.values() for name in names)


def _register(named: str | None) -> None:
    """Import only the verb that was named: a job plans at every start, and must not load the Docker SDK for it."""
    for panel, names in _PANELS.items():
        for name in {named} & {*names} if named in _EVERYTHING else names:
            module = importlib.import_module(f"dray.cli.{'model' if name in _OF_MODEL else name}")
            if name in _GROUPS:
                app.add_typer(module.app, name=name, rich_help_panel=panel)
            else:
                verb = getattr(module, _OF_MODEL.get(name, name))
                app.command(name, hidden=name == "finish", rich_help_panel=panel)(verb)
    examples.show(app)


def main() -> None:
    """Run one verb. A failure is printed without a traceback, and ends with an exit code of contract.exit_codes."""
    argv = sys.argv[1:]
    # `finish` handles streams and folders itself: it must not fail.
    output = None if argv[:1] == ["finish"] else Streams()
    code = _code(argv)
    if output and (refusal := output.refusal()):
        code = code or _say(refusal)
    settle()
    raise SystemExit(code)


def _code(argv: list[str]) -> int:
    try:
        if argv[:1] != ["finish"]:
            require(argv)
        if (before := completion.typed()) is not None:
            return _complete(before)
        _register(argv[0] if argv else None)
        cut = argv.index("--") if argv[:1] and argv[0] in _START and "--" in argv else len(argv)
        return int(app(argv[:cut], obj=argv[cut + 1 :], standalone_mode=False) or exit_codes.DONE)
    except TyperException as wrong:
        if not wrong.format_message():  # nothing was typed, and typer has printed the help
            return exit_codes.CONFIG
        return _say(usage.error(wrong))
    except typer.Abort:  # Ctrl-C that no verb has handled
        return 130
    except Exception as raised:
        return _say(unexpected.error(raised))


def _complete(before: list[str]) -> int:
    """Answer a shell that completes a line. A command behind -- is left to the shell itself."""
    named = [word for word in before if word != "--version"]
    if not named:
        completion.stubs(app, (name for name in _EVERYTHING if name != "finish"))
    elif named[0] in _EVERYTHING and not (named[0] in _START and "--" in named):
        _register(named[0])
    else:
        return exit_codes.DONE
    completion.answer(app)
    return exit_codes.DONE


def _say(error: DrayError) -> int:
    try:
        print(f"dray: {secrets.redacted(str(error))}", file=sys.stderr, flush=True)
    except OSError:  # standard error may be full too; the exit code still tells
        silence(2)
    return error.finding.code
