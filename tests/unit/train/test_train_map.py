"""A user's function on rows: before the column is read, once, as planned, and its mistakes are told with their row."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dray.contract.findings import ConfigError
from dray.runs.prepare import over, read_recipe
from helpers import PYTHON, ROOT

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from dray.train.config import Config  # noqa: E402
from dray.train.data import datasets, formats, resolve, tokenizer  # noqa: E402
from dray.train.data.datasets import Datasets  # noqa: E402
from dray.train.data.formats import Map  # noqa: E402
from dray.train.data.token_cache import Tokens  # noqa: E402
from trainings import Forks, Run, config  # noqa: E402

pytestmark = pytest.mark.torch

CLEAN = """\
import re

SPACES = re.compile(r"\\s+")

def clean(row):
    number = int(row["id"])
    if number % 3 == 0:
        return None
    text = SPACES.sub(" ", row["body"]).upper()
    return {"text": text} if number % 3 == 1 else [{"text": text}, {"text": "again " + text}]
"""
BODIES = [f"line  {number:02} é" for number in range(30)]
WANTED = [
    text
    for number, body in enumerate(BODIES)
    for text in [body.replace("  ", " ").upper(), "again " + body.replace("  ", " ").upper()][: number % 3]
]


def prep(folder: Path, source: str = CLEAN, name: str = "prep.py") -> Path:
    path = folder / name
    path.write_text(source)
    return path


def rows(folder: Path, kind: str) -> Path:
    path = folder / f"my rows.{kind}"
    table = [{"id": number, "body": body} for number, body in enumerate(BODIES)]
    lines = "".join(json.dumps(row) + "\n" for row in table)
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "jsonl":
        path.write_text(lines)
    elif kind == "json":
        path.write_text(json.dumps(table))
    elif kind in ("csv", "tsv"):
        between = "," if kind == "csv" else "\t"
        path.write_text("".join(f"{one}{between}{two}\n" for one, two in [("id", "body"), *enumerate(BODIES)]))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path, row_group_size=7)
    else:
        with pa.ipc.new_file(str(path), pa.Table.from_pylist(table).schema) as writer:
            writer.write_table(pa.Table.from_pylist(table), max_chunksize=7)
    return path


def documents(path: Path, source: str = CLEAN, column: str = "text", **more: object) -> list[str]:
    reading = formats.Reading(column, map=Map(f"prep.py:clean\n{source}"), **more)
    return [
        text
        for piece in resolve.dataset(str(path), "train").pieces(reading)
        for text in formats.documents(piece, reading)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet", "arrow"])
def test_it_has_whole_rows_of_any_file(tmp_path: Path, kind: str) -> None:
    assert documents(rows(tmp_path, kind)) == WANTED


def test_a_line_is_a_row_with_a_text(tmp_path: Path) -> None:
    path = tmp_path / "my lines.txt"
    path.write_text("one\n\ntwo\n")
    back = "def clean(row):\n    return {**row, 'text': row['text'][::-1]}\n"
    assert documents(path, back) == ["eno", "owt"]
    (builtin,) = resolve.dataset("builtin", "train").pieces(formats.Reading("text"))
    reading = formats.Reading("text", map=Map(f"prep.py:clean\n{back}"))
    plain = [*formats.documents(builtin, formats.Reading("text"))]
    assert [text[::-1] for text in formats.documents(builtin, reading)] == plain


def test_what_it_returns_may_be_a_conversation_or_a_question_with_its_answer(tmp_path: Path) -> None:
    path = rows(tmp_path, "jsonl")
    asks = "def clean(row):\n    return {'q': row['body'], 'a': None if row['id'] else 'yes'}\n"
    (found,) = documents(path, asks, "q", answer="a", is_conversation=True)
    assert json.loads(found) == [
        {"role": "user", "content": "line  00 é"}, {"role": "assistant", "content": "yes"},
    ]  # fmt: skip
    chats = """
def clean(row):
    return {"messages": [{"role": "user", "content": row["body"]}, {"role": "assistant", "content": "yes"}]}
"""
    assert json.loads(documents(path, chats, "messages", is_conversation=True)[1])[0]["content"] == "line  01 é"


def loaded(folder: Path, *overrides: str) -> tuple[Config, Datasets]:
    chosen = config(folder, "data.sequence_length=16", *overrides)
    return chosen, datasets.load(chosen, tokenizer.load(chosen))


def texts(folder: Path, tokens: Tokens) -> list[str]:
    return str(tokenizer.load(config(folder)).decode(tokens.ids)).removesuffix("<|endoftext|>").split("<|endoftext|>")


def test_it_is_made_once_for_its_bytes_and_the_dataset_s(tmp_path: Path, capfd) -> None:
    path, calls = rows(tmp_path, "jsonl"), tmp_path / "calls"
    calls.write_text("")
    one_more = f"    with open({str(calls)!r}, 'a') as file:\n        file.write('.')\n"
    counts = CLEAN.replace("    number", f"{one_more}    number")
    file = prep(tmp_path, counts)
    given = (f"data.train={path}", f"data.validation={path}", f"data.map={file}:clean")
    _, found = loaded(tmp_path, *given)
    assert texts(tmp_path, found.validation["eval"]) == WANTED
    assert len(calls.read_text()) == 30
    assert capfd.readouterr().out == "clean of prep.py: 30 rows read, 10 dropped, 10 added\n"
    loaded(tmp_path, *given)
    assert (len(calls.read_text()), capfd.readouterr().out) == (30, "")
    prep(tmp_path, f"{counts}# \n")
    loaded(tmp_path, *given)
    assert len(calls.read_text()) == 60
    path.write_text('{"id": 1, "body": "' + "b" * 40 + '"}\n')
    loaded(tmp_path, *given)
    assert len(calls.read_text()) == 61
    assert not (tmp_path / "__pycache__").exists()


def test_sources_and_evaluations_have_functions_of_their_own(tmp_path: Path) -> None:
    path = rows(tmp_path, "jsonl")
    prep(tmp_path)
    other = prep(tmp_path, "def clean(row):\n    return {'text': 'x' * 40}\n\ndef same(row):\n    return row\n", "b.py")
    chosen, found = loaded(
        tmp_path, f"data.map={tmp_path}/prep.py:clean", f"data.mix.a.dataset={path}", f"data.mix.b.dataset={path}",
        f"data.mix.b.map={other}:clean", f"evaluate.plain.dataset={path}", "evaluate.plain.column=body",
        f"evaluate.mapped.dataset={path}", f"evaluate.mapped.map={other}:clean",
    )  # fmt: skip
    assert texts(tmp_path, found.validation["eval-a"]) == WANTED[-1:]
    assert texts(tmp_path, found.validation["eval-b"]) == ["x" * 40]
    words = tokenizer.load(chosen)
    assert texts(tmp_path, datasets.evaluation(chosen, words, "plain")) == BODIES
    assert texts(tmp_path, datasets.evaluation(chosen, words, "mapped")) == ["x" * 40] * 30


def test_what_it_keeps_between_rows_begins_anew_with_each_dataset(tmp_path: Path) -> None:
    once = "seen = set()\n\ndef clean(row):\n    text = row['body']\n    if text in seen:\n        return None\n"
    once += "    seen.add(text)\n    return {'text': text}\n"
    path, twice = rows(tmp_path, "jsonl"), tmp_path / "twice.jsonl"
    twice.write_text(path.read_text() * 2)
    _, found = loaded(
        tmp_path, f"data.train={path}", f"data.validation={twice}", f"data.map={prep(tmp_path, once)}:clean"
    )
    assert texts(tmp_path, found.validation["eval"]) == BODIES


def test_a_stream_has_the_same_documents_and_another_position(tmp_path: Path) -> None:
    path = rows(tmp_path, "jsonl")
    given = (f"data.train={path}", f"data.validation={path}", "data.streaming=true", "batch.global_size=1",
             f"data.map={prep(tmp_path)}:clean")  # fmt: skip
    _, found = loaded(tmp_path, *given)
    row = np.concatenate(found.training.rows(range(40)))
    assert texts(tmp_path, Tokens(row, np.zeros(1, np.uint64)))[: len(WANTED)] == WANTED
    prep(tmp_path, CLEAN + "# \n")
    assert loaded(tmp_path, *given)[1].training.identity != found.training.identity


@pytest.mark.slow
def test_the_ranks_run_what_was_planned(forks: Forks, tmp_path: Path) -> None:
    """Its file may have changed by then, or be where a node does not see it."""
    path = rows(tmp_path, "jsonl")
    file = prep(tmp_path)
    given = (f"data.train={path}", f"data.validation={path}", f"data.map={file}:clean", "train.steps=3")
    run = Run(forks, tmp_path / "first", 2, *given)
    file.write_text("1 / 0\n")
    run.end()
    assert "clean of prep.py: 30 rows read, 10 dropped, 10 added\n" in run.log(0).read_text()
    assert run.events("start")[0]["tokens"] == sum(len(text.encode()) + 1 for text in WANTED)
    text = (run.folder / "checkpoints/final/README.md").read_text()
    assert '\ndata.map = "prep.py:clean"\n' in text
    assert "SPACES" not in text
    assert run.plan.recipe.data.map == f"prep.py:clean\n{CLEAN}"
    again = over(run.plan.recipe, ["train.lr=1"])  # as `dray model eval` reads a run's own recipe
    assert again.data.map == run.plan.recipe.data.map


ROW = "row 1 of FILE"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def clean(row):\n    x = 1\n    return row['gone']\n",
         f"clean of prep.py failed\n  where:  prep.py:3\n  wanted: None, a dict or a list of dicts for {ROW}\n"
         "  found:  KeyError: 'gone'\n  fix:    correct prep.py, then check it: dray data inspect RECIPE"),
        ("import sys\n\ndef clean(row):\n    sys.exit('no')\n", "clean of prep.py failed\n  where:  prep.py:4\n"),
        ("import nowhere.at_all\ndef clean(row):\n    return row\n",
         f"clean of prep.py failed\n  where:  prep.py:1\n  wanted: None, a dict or a list of dicts for {ROW}\n"
         "  found:  ModuleNotFoundError: No module named 'nowhere'"),
        ("def clean(row):\n    return row\nraise SystemExit(3)\n", "clean of prep.py failed\n  where:  prep.py:3\n"),
        ("def clean(row):\n    return row\ndel clean\n", "clean of prep.py failed\n"),
        ("def clean(row):\n    return row['body']\n",
         f"clean of prep.py did not return rows\n  where:  {ROW}\n"
         "  wanted: None, a dict or a list of dicts\n  found:  str: line  00"),
        ("def clean(row):\n    return [row, 1]\n", "found:  list: [{'id': 0"),
        ("def clean(row):\n    yield row\n", "found:  generator: <generator object clean at"),
        ("def clean(row):\n    return {'txt': 'x'}\n",
         f"there is no column 'text'\n  wanted: text in what clean of prep.py returned for {ROW}\n  found:  txt\n"),
        ("def clean(row):\n    return {'text': 5}\n",
         f"column 'text' is not text\n  where:  what clean of prep.py returned for {ROW}\n"
         "  wanted: strings\n  found:  int: 5\n"),
        ("def clean(row, other):\n    return row\n", "missing 1 required positional argument: 'other'"),
    ],
)  # fmt: skip
def test_its_mistakes_are_told_with_function_row_and_file(tmp_path: Path, source: str, said: str) -> None:
    path = rows(tmp_path, "jsonl")
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, f"data.train={path}", f"data.map={prep(tmp_path, source)}:clean")
    assert said.replace("FILE", str(path)) in str(refused.value)


def test_the_row_is_counted_in_its_part_of_the_file(tmp_path: Path, monkeypatch) -> None:
    fails = "def clean(row):\n    assert int(row['id']) != 17\n    return {'text': row['body']}\n"
    monkeypatch.setattr(resolve, "_PIECE", 100)
    for kind, place in (("parquet", "row 18 of "), ("jsonl", "row 1 of "), ("csv", "row 18 of ")):
        path = rows(tmp_path, kind)
        with pytest.raises(ConfigError) as refused:
            documents(path, fails)
        after = " from byte 600 on" * (kind == "jsonl")
        assert f"a list of dicts for {place}{path}{after}\n" in str(refused.value)


def test_a_line_that_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "body": "b"}\n"just text"\n')
    with pytest.raises(ConfigError) as refused:
        documents(path)
    assert str(refused.value) == (
        f"there is no column 'text'\n  wanted: text in row 2 of {path}\n"
        "  found:  str\n  fix:    set data.column to one of these"
    )


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read_recipe(ROOT / "tests/tiny.toml", ["train.steps=5", *overrides])
    return str(refused.value).replace(str(folder), "HERE")


@pytest.mark.parametrize(
    "named", ["prep.py", "prep:clean", "prep.py:", ":clean", "prep.py:a-b", "prep.py:a.b", "prep.py:1", ".py:f:"]
)
def test_what_names_no_function(tmp_path: Path, named: str) -> None:
    for key in ("data.map", "data.mix.a.map", "evaluate.a.map"):
        given = [] if key == "data.map" else [f"{key.removesuffix('map')}dataset=builtin"]
        assert "expected FILE.py:FUNCTION, such as prep.py:clean" in refusal(tmp_path, f"{key}={named}", *given)


def test_what_is_refused_before_the_queue(tmp_path: Path) -> None:
    file = tmp_path / "my prep.py"
    given = f"data.map={file}:clean"
    assert "the file of data.map cannot be read\n  where:  HERE/my prep.py\n  found:  No such file" in refusal(
        tmp_path, given
    )
    file.mkdir()
    assert "the file of data.map cannot be read\n" in refusal(tmp_path, given)
    file.rmdir()
    for content, said in (
        (b"def clean(row:\n", "the file of a function on rows is not valid Python\n  where:  HERE/my prep.py\n"),
        (b"x = '\0'\n", "the file of a function on rows is not valid Python\n"),
        (b"# \xe9\n", "the file of data.map is not UTF-8 text\n  where:  HERE/my prep.py:1:3\n"),
        (b"", "there is no function clean\n  where:  HERE/my prep.py\n"),
        (
            b"def cleans(row): ...\ndef other(row): ...\n",
            "found:  cleans, other\n  fix:    name an existing function: my prep.py:cleans",
        ),
        (b"class A:\n    def clean(row): ...\n", "found:  no function\n"),
        (b"async def clean(row): ...\n", "there is no function clean\n"),
        (b"T = 'hf_" + b"Ab1" * 10 + b"'\ndef clean(row): ...\n", "seems to hold a secret, and every run folder"),
        (b"#" * (300 << 10), "the file of data.map "),
    ):
        file.write_bytes(content)
        assert said in refusal(tmp_path, given), content[:40]
        assert "Ab1Ab1" not in refusal(tmp_path, given)
    prep(tmp_path, name="my prep.py")
    file.chmod(0o600)
    assert "your private file would be copied into a run folder" in refusal(tmp_path, given, "runs.share=group")


@pytest.mark.slow
def test_a_plan_runs_nothing_of_it_and_inspect_does(tmp_path: Path) -> None:
    """By the verbs; the file is found beside the recipe, from whatever folder."""
    rows(tmp_path, "jsonl")
    prep(tmp_path, CLEAN + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    recipe = tmp_path / "my recipe.toml"
    text = (ROOT / "tests/tiny.toml").read_text()
    recipe.write_text(text.replace("[data]", '[data]\ntrain = "my rows.jsonl"\nmap = "prep.py:clean"'))
    env = {**PYTHON, "DRAY_HOME": str(ROOT), "HOME": "/nonexistent"}

    def dray(*argv: str | Path) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "dray", *argv], env=env, capture_output=True, text=True, check=True, cwd="/"
        )
        return ended.stdout

    dray("recipe", "check", recipe, "train.steps=5")
    plan = dray("plan", recipe, "train.steps=5", "data.packing=bfd")
    assert "; tokenizer: none, a token for each byte, packing bfd; data.map prep.py:clean\n" in plan
    assert "SPACES" not in plan + dray("plan", recipe, "train.steps=5", "-v")
    assert not (tmp_path / "ran").exists()
    given = (recipe, "train.steps=5", "data.sequence_length=16", f"data.cache_dir={tmp_path}/tokens")
    found = json.loads(dray("data", "inspect", *given, "--json"))
    assert (tmp_path / "ran").exists()
    assert found["training"][0]["documents"] + found["evaluation"][0]["documents"] == len(WANTED)


def test_the_page_s_example_does_what_it_says() -> None:
    page = (ROOT / "docs/data.md").read_text()
    source = page[page.index("# prep.py\n") :].split("```")[0]
    function = Map(f"prep.py:ask\n{source}")
    row = {"question": "2+2?", "answers": ["4", "four"], "score": 3}
    assert function(row, "row 1") == [
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}]}
        for answer in ("4", "four")
    ]
    assert function({**row, "score": 1}, "row 2") == []
    assert function.summary == "ask of prep.py: 2 rows read, 1 dropped, 1 added"
