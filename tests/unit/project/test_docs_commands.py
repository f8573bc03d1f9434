"""Each `dray ...` of a page is one that the command line takes: whole in a block, verb and options in a sentence."""

from __future__ import annotations

import re
import shlex

import pytest

import verbs
from dray.runs.prepare import read_recipe
from helpers import ROOT, section

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/reference").glob("*.md")),
]
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^ *(?:\$ )?(?:\.venv/bin/)?dray ([a-z].*)$", re.MULTILINE)
SENTENCE = re.compile(r"`(?:\.venv/bin/)?dray ([a-z][^`]*)`")


def blocks(text: str) -> list[str]:
    """The commands without `dray`, and without what stands beside them: two spaces and a remark, or a `|| true`."""
    lines = [line for block in BLOCK.findall(text) for line in COMMAND.findall(re.sub(r"\\\n *", "", block))]
    return [re.split(r"  +| \|\| | >", line)[0] for line in lines]


def sentences(text: str) -> list[str]:
    return [re.split(r" >", " ".join(line.split()))[0] for line in SENTENCE.findall(BLOCK.sub("", text))]


def shown(find: object) -> list[tuple[str, str]]:
    return [(page.name, line) for page in PAGES for line in dict.fromkeys(find(page.read_text(encoding="utf-8")))]


BLOCKS = [(page, line) for page, line in shown(blocks) if page != "errors.md"]


@pytest.mark.parametrize(("page", "line"), BLOCKS, ids=lambda value: value)
def test_a_command_in_a_block_is_taken(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bad ones of docs/reference/errors.md are run by that page's own test."""
    monkeypatch.chdir(ROOT)
    argv = shlex.split(line)
    verbs.parse(argv)
    recipe = next((ROOT / word for word in argv if re.fullmatch(r"recipes/[\w-]+\.toml", word)), None)
    if recipe and recipe.exists() and "--" not in argv:
        assert read_recipe(recipe, [re.sub(r",.*", "", word) for word in argv if re.match(r"[a-z][\w.]*=", word)])


@pytest.mark.parametrize(("page", "line"), shown(sentences), ids=lambda value: value)
def test_a_verb_in_a_sentence_has_these_options(page: str, line: str) -> None:
    command, rest = verbs.named(shlex.split(line))
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} <= known | {"--help"}


def test_remote_is_among_the_pages() -> None:
    assert blocks(section("runs.md", "## From your desk"))[0].startswith("remote add lumi ")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("runs --colour", "No such option"),
        ("remote ad lumi x", "dray has no verb ad"),
        ("remote add lumi", "Missing parameter"),
        ("report --on", "requires an argument"),
    ],
)
def test_a_wrong_one_is_seen(line: str, why: str) -> None:
    with pytest.raises(Exception, match=why):
        verbs.parse(shlex.split(line))
