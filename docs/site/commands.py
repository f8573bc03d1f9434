"""Every `dray VERB --help`, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from text import entry, plain, slug

from dray import cli
from dray.cli import app


def pages() -> dict[str, str]:
    """One page for each verb, with the verbs in it, and the list of them."""
    panels = {**cli.VERBS, "Also": {verb: line for verb, line in cli.HIDDEN.items() if line}}
    verbs: Any = app.command(*(verb for panel in panels.values() for verb in panel))
    context = verbs.make_context("dray", [], resilient_parsing=True)
    found = {f"reference/commands/{name}.md": _page(name, one, context) for name, one in verbs.commands.items()}
    return {"reference/commands.md": _list(panels, verbs.commands), **found}


def _list(panels: dict[str, dict[str, str]], verbs: dict[str, Any]) -> str:
    shown = ["# Commands\n\nWhat `dray VERB -h` prints, a page for each verb.\n"]
    for panel, names in panels.items():
        shown.append(f"## {panel}\n")
        shown += [f"- [dray {name}](commands/{name}.md): {plain(_first(verbs[name].help))}" for name in names]
        shown.append("")
    tree = "\n".join(f"commands/{name}" for name in verbs)
    return "\n".join(shown) + f"\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"


def _first(text: str | None) -> str:
    return (text or "").strip().split("\n\n")[0]


def _page(name: str, verb: Any, above: Any) -> str:  # noqa: ANN401  typer has no name for its commands
    return "\n".join(_section(name, verb, above, "#"))


def _section(name: str, verb: Any, above: Any, level: str) -> Iterator[str]:  # noqa: ANN401  likewise
    context = verb.context_class(verb, info_name=name, parent=above)
    path = context.command_path
    yield f"{level} {path}\n"
    yield from (f"{plain(part)}\n" for part in (verb.help or "").split("\n\n"))
    yield f"```text\n{' '.join([path, *verb.collect_usage_pieces(context)])}\n```\n"
    for parameter in verb.params:
        if record := parameter.get_help_record(context):
            option = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.name
            yield entry(record[0], slug(f"{path}-{option}"), plain(record[1]) or "no more to say")
    if verb.epilog:
        title, *examples = verb.epilog.strip("\b\n").splitlines()
        yield f"{title}\n\n```text\n" + "\n".join(line.strip() for line in examples) + "\n```\n"
    for inner, one in getattr(verb, "commands", {}).items():
        if not one.hidden:
            yield from _section(inner, one, context, "##")
