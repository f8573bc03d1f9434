"""Retired words stay out: the terms of torch, transformers, accelerate, DeepSpeed, Slurm and Apptainer win."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator

import pytest

from helpers import ROOT

ROOMS = ("src", "docs", "recipes", "slurm", "containers", ".github")
FILES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff",
    "Makefile", "pyproject.toml", "hatch_build.py", ".ci/run", ".ci/release",
)  # fmt: skip
TEXT = {".py", ".md", ".toml", ".sh", ".json", ".jsonl", ".def", ".in", ".yml", ".yaml", ""}

# A retired word, and what this field says. A word inside a snake_case name counts.
RETIRED = {
    "foretell|foretells|foretold|foretelling": "predict, predicted",
    "to be foretold|what is wanted of": "labels",
    "hears? one another|heard one another": "communicate; say which transport and bandwidth",
    "(?:does|do|did|will) not come out|came out on": "is not divisible by",
    "whole or not (?:there|at all)": "atomic",
    "keepers?": "rank supervisor",
    "heaps?": "buckets",
    "lanes?": "stream shards",
    "meet within": "rendezvous_timeout_s",
    "meetings?": "rendezvous",
    "(?:nodes?|ranks?|machines|runners?|they|all|it is)(?: that)? (?:meet|meets|met)": "rendezvous",
    r"data\.apart|apart = (?:true|false)|apart: bool": "data.document_mask",
    "passes (?:over|of)|pass(?:es)? over the texts?": "epochs; gradient accumulation steps, micro-batches",
    r"masked percent": "mlm_probability",
    "recompute[sd]?|recomputing|recomputation": "activation_checkpointing",
    "small matrices beside": "low-rank adapters",
    r"train\.clip|clip = \d": "max_grad_norm",
    'objective answers|objective = "answers"': "sft",
    "(?:the|which|what|other|one|slow|slower) wires?|wire that was used": "transport",
    r"another order of samples": "data order differs",
    r"(?:be|been) had|can be had|to be had": "is missing; say which part and how to get it",
    "who(?:so)?ever|whomever": "name the reader: you, the user, the caller",
    "aloud": "logged, warned",
    "learnt|unlearnt": "learned, trained",
    "strangers?": "another user",
    "unasked": "by default",
    "words (?:of|that) the tokenizer|tokenizer's words": "tokens",
}
CASE = {
    r"\bNOTHING\b": "IGNORE_INDEX",
    r"\.turn\(|turn\(last": "accumulate(sync=)",
    r"\bdata\.block\b|^block = \d": "data.sequence_length",
}
# Names in Python code that do not say what they hold.
NAMES = {
    "said": "config, settings, argv, text, reply",
    "words": "tokenizer, argv, tokens",
    "there": "what it is: exists, present, info",
    "mine": "own_rank, local",
    "patient": "control_group",
    "aloud": "warnings",
    "meeting": "rendezvous",
    "anew": "fresh",
}
# A line that may keep its word: a path pattern, a part of the line, and why.
ALLOWED: dict[tuple[str, str], str] = {
    ("docs/reference/*.schema.json", ""): "made from the models, which are held to this themselves",
    ("src/dray/fitness/variables.toml", "UCX_MAX_"): "UCX's own name",
    ("docs/reference/glossary.md", "| "): "the table of what we do not say",
}


def names() -> list[str]:
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*"))] + [ROOT / name for name in FILES]
    kept = [path for path in found if path.is_file() and "__pycache__" not in path.parts and path.suffix in TEXT]
    return [path.relative_to(ROOT).as_posix() for path in kept]


def pattern(words: str) -> str:
    """Spaces match what separates words in prose and in names; the ends match also beside an underscore."""
    return rf"(?<![A-Za-z])(?:{words.replace(' ', r'[ _-]')})(?![A-Za-z])"


COMPILED = [(re.compile(pattern(words), re.IGNORECASE), better) for words, better in RETIRED.items()]
COMPILED += [(re.compile(words), better) for words, better in CASE.items()]
# Most files have none: one search says so.
ANY = (re.compile(pattern("|".join(RETIRED)), re.IGNORECASE), re.compile("|".join(CASE), re.MULTILINE))


def findings(name: str, text: str) -> list[str]:
    found = []
    lines = text.splitlines() if any(expression.search(text) for expression in ANY) else []
    for number, line in enumerate(lines, 1):
        if any(fnmatch.fnmatch(name, where) and part in line for where, part in ALLOWED):
            continue
        for expression, better in COMPILED:
            found += [f"{name}:{number}: {hit[0]!r}: write {better}" for hit in expression.finditer(line)]
    if name.endswith(".py"):
        found += [
            f"{name}:{number}: the name {one!r}: write {NAMES[one]}" for number, one in sorted(set(names_of(text)))
        ]
    return found


def names_of(source: str) -> Iterator[tuple[int, str]]:
    """The retired names that this code gives to anything."""
    for node in ast.walk(ast.parse(source)):
        for name in (getattr(node, field, None) for field in ("id", "arg", "attr", "name")):
            if isinstance(name, str) and name.strip("_") in NAMES:
                yield getattr(node, "lineno", 0), name.strip("_")


@pytest.mark.seconds
@pytest.mark.parametrize("name", names())
def test_no_retired_word(name: str) -> None:
    path = ROOT / name
    found = findings(name, path.read_text(encoding="utf-8")) + findings(name, path.stem.replace("-", " "))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "the model foretells the next token",
        "rank_keeper = start()",
        "A batch of 16 does not come out on 6 ranks",
        "labels[mask] = NOTHING",
        "meet_within = 60",
        "all nodes meet first",
    ],
)
def test_a_retired_word_is_found(text: str) -> None:
    assert findings("docs/page.md", text)


def test_a_retired_name_is_found() -> None:
    assert findings("src/a.py", "def run(*, said): ...") == [
        "src/a.py:1: the name 'said': write config, settings, argv, text, reply"
    ]


@pytest.mark.parametrize("text", ["what the plan said", "the parts that meet this need", "words of a sentence"])
def test_plain_english_stays(text: str) -> None:
    assert findings("docs/page.md", text) == []
