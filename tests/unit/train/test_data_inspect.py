"""`dray data inspect`: what a run will read, by the code that reads it, and its first rows as the model sees them."""

from __future__ import annotations

import io
import json
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import command
from dray.contract.findings import ConfigError
from dray.contract.trainer import image_tasks
from dray.runs.prepare import read_recipe
from helpers import ROOT

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.cli import recipe as verb
from dray.train.data import datasets, tokenizer
from dray.train.outputs import inspect
from trainings import GPT, config

pytestmark = pytest.mark.torch
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def report(folder: Path, *overrides: str, rows: int = 2, steps: str = "steps=20") -> dict[str, Any]:
    """As the job in the image writes it."""
    settings = read_recipe(
        ROOT / "tests/tiny.toml", [f"data.cache_dir={folder}/tokens", f"train.{steps}", *GPT, *overrides]
    )
    file = folder / "report.json"
    inspect.run(image_tasks.Inspect(settings.model_dump(mode="json"), rows, str(file)))
    return json.loads(file.read_text())


def shown(found: dict[str, Any]) -> str:
    file = io.StringIO()
    with redirect_stdout(file):
        verb.show_data(found)
    return file.getvalue()


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A hundred documents of 8 tokens, and one of 41."""
    path = tmp_path / "my lines.txt"
    path.write_text("".join(f"line {number:02}\n" for number in range(100)) + "long " * 8 + "\n")
    return path


def test_a_mix_is_told_with_its_shares(tmp_path: Path, lines: Path) -> None:
    overrides = (
        f"data.mix.web.dataset={lines}", "data.mix.web.weight=3", "data.mix.code.dataset=builtin",
        f"data.test={lines}", f"evaluate.more.dataset={lines}",
    )  # fmt: skip
    found = report(tmp_path, *overrides)
    web, code = found["training"]
    # 5 of 101 documents are kept for evaluation, the long one among them.
    assert web == {
        "key": "data.mix.web", "dataset": str(lines), "files": 1, "bytes": lines.stat().st_size, "documents": 96,
        "tokens": 96 * 8, "samples": 24, "shortest": 8, "median": 8, "longest": 8, "longer_than_a_sample": 0,
        "samples_read": 113, "epochs": 113 / 24, "share": 113 / 160,
    }  # fmt: skip
    assert (code["key"], code["samples_read"], code["share"], code["files"]) == ("data.mix.code", 47, 47 / 160, 0)
    assert [(one["key"], one.get("held_out")) for one in found["evaluation"]] == [
        ("data.mix.web", True), ("data.mix.code", True), ("data.test", None), ("evaluate.more", None),
    ]  # fmt: skip
    held = found["evaluation"][0]
    assert (held["documents"], held["tokens"], held["longest"], held["longer_than_a_sample"]) == (5, 73, 41, 1)
    text = shown(found)
    assert f"\ndata.mix.web = {lines}\n  files                       1\n" in text
    assert {
        "steps 20",
        "global size 8",
        "sequence length 32",
        "share 0.7063",
        "samples read 113",
        "epochs 4.708",
    } <= set(figures(text))


def figures(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith("  ")]


def test_the_rows_are_those_that_the_run_will_read(tmp_path: Path, lines: Path) -> None:
    found = report(tmp_path, f"data.mix.web.dataset={lines}", "data.mix.code.dataset=builtin", rows=5)
    chosen = config(tmp_path / "run", f"data.mix.web.dataset={lines}", "data.mix.code.dataset=builtin")
    feed = datasets.load(chosen, tokenizer.load(chosen)).training
    assert [row["input_ids"] for row in found["rows"]] == feed.rows(range(5)).tolist()
    assert {row["source"] for row in found["rows"]} == {"web", "code"}
    for row in found["rows"]:
        assert row["labels"] == [*row["input_ids"][1:], -100]
        assert [(part["kind"], part["tokens"]) for part in row["parts"]] == [("context", 1), ("predicted", 31)]


def test_the_report_of_a_reader(tmp_path: Path, lines: Path) -> None:
    found = report(tmp_path, f"data.train={lines}", f"data.validation={lines}", "data.sequence_length=16", rows=1)
    (row,) = found["rows"]
    first, rest = (part["text"] for part in row["parts"])
    head, training, held, sample = shown(found).split("\n\n")
    assert head.startswith("tiny: causal, tokenizer bytes\n")
    counts = ["files 1", f"bytes {lines.stat().st_size}", "documents 101", "tokens 841", "samples 53"]
    spread = ["shortest 8", "median 8", "longest 41", "longer than a sample 1"]
    assert training.startswith(f"data.train = {lines}\n")
    assert figures(training) == [*counts, *spread, "samples read 160", "epochs 3.044"]
    assert figures(held) == [*counts, *spread]
    assert sample == f"sample 0: 16 tokens, 15 predicted\n  context    {first!r}\n  predicted  {rest!r}\n"


def test_what_an_assistant_says_is_predicted_and_documents_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"text": CHAT}) + "\n" for _ in range(40)))
    found = report(tmp_path, f"data.train={path}", "train.objective=sft", "data.document_mask=true",
                   "data.sequence_length=128", rows=1)  # fmt: skip
    parts = found["rows"][0]["parts"]
    document = next(part["document"] for part in parts if part["kind"] == "predicted") + 1
    whole = [(part["kind"], part["text"]) for part in parts if part["document"] == document]
    assert whole == [
        ("context", "<|user|>\n2+2?<|endoftext|>\n<|assistant|>\n"),
        ("predicted", "4<|endoftext|>"),
        ("context", "\n"),
    ]
    assert "\n  -- attention ends here: next document\n  context    '<|user|>\\n2+2?<|endoftext|>" in shown(found)


def test_packing_is_told_with_what_it_drops_and_what_fills(tmp_path: Path, lines: Path) -> None:
    found = report(tmp_path, f"data.train={lines}", f"data.validation={lines}", "data.packing=bfd",
                   "data.document_mask=true", "data.sequence_length=20", rows=8)  # fmt: skip
    (training,), (held,) = found["training"], found["evaluation"]
    counts = {"documents": 101, "longer_than_a_sample": 1, "dropped_tokens": 21, "padding": 200}
    assert training["packing"] == held["packing"] == {"strategy": "bfd", **counts}
    assert (training["documents"], training["tokens"], training["samples"]) == (101, 841, 51)
    text = shown(found)
    assert {"packing padding 200", "packing dropped tokens 21"} <= set(figures(text))
    assert "\n  -- attention ends here: next document\n  padding    '<|endoftext|><|endoftext|>" in text
    row = found["rows"][0]
    assert [part["kind"] for part in row["parts"]] == ["context", "predicted"] * 2 + ["padding"]
    assert row["position_ids"] == [*range(8), *range(8), *range(4)]


def test_a_masked_token_is_told_with_its_label(tmp_path: Path, lines: Path) -> None:
    (row,) = report(tmp_path, f"data.train={lines}", "train.objective=masked", "train.mlm_probability=0.5",
                    rows=1)["rows"]  # fmt: skip
    masked = [part for part in row["parts"] if part["kind"] == "masked"]
    assert masked
    place = 0
    for part in row["parts"]:
        own = slice(place, place + part["tokens"])
        place += part["tokens"]
        ids, labels = row["input_ids"][own], row["labels"][own]
        assert {(label == -100, label == token) for token, label in zip(ids, labels, strict=True)} == {
            {"context": (True, False), "predicted": (False, True), "masked": (False, False)}[part["kind"]]
        }
    assert place == 32


def test_a_stream_is_not_counted(tmp_path: Path, lines: Path) -> None:
    found = report(tmp_path, "data.streaming=true", f"data.train={lines}", f"data.validation={lines}")
    assert found["training"] == [
        {"key": "data.train", "dataset": str(lines), "files": 1, "bytes": lines.stat().st_size, "pieces": 1}
    ]
    assert len(found["rows"]) == 2
    assert "  pieces                      1\n  a stream: its tokens are not counted\n" in shown(found)


def test_a_terminal_obeys_nothing_of_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "evil\x1b[31m.txt"
    path.write_text("\x1b[31mred \u202eback \x9b2J\x07 [bold]\n" * 40)
    text = shown(report(tmp_path, f"data.train={path}"))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "red \\u202eback \\x9b2J\\x07 [bold]<|endoftext|>\\x1b[31mr" in text
    assert "evil\\u001b[31m.txt" in text


def test_epochs_and_limits_and_no_rows(tmp_path: Path, lines: Path) -> None:
    found = report(tmp_path, f"data.train={lines}", "data.max_train_samples=5", steps="epochs=4", rows=0)
    assert (found["steps"], found["rows"], found["training"][0]["tokens"]) == (2, [], 160)
    assert found["training"][0]["documents"] == 20
    few = report(tmp_path, f"data.train={lines}", "train.steps=1", "train.warmup_steps=0", rows=1000)
    assert len(few["rows"]) == 8


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.txt", None, "the dataset does not exist"),
        ("empty.txt", "", "there are too few tokens in data.train"),
        ("other.jsonl", '{"body": "x"}\n', "there is no column 'text'"),
        ("bad.jsonl", '{"text": \n', "the dataset is not JSON"),
        ("number.jsonl", '{"text": 1}\n', "column 'text' is not text"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        report(tmp_path, f"data.train={tmp_path}/{name}")
    assert not (tmp_path / "report.json").exists()


def dray(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return command.dray("data", "inspect", *argv)


@pytest.mark.slow
def test_the_verb(tmp_path: Path, lines: Path) -> None:
    recipe = tmp_path / "my recipe.toml"
    recipe.write_text((ROOT / "tests/tiny.toml").read_text().replace("[data]", '[data]\ntrain = "my lines.txt"'))
    given = (recipe, "train.steps=20", f"data.cache_dir={tmp_path}/tokens")
    ended = dray(*given, "--json", "--rows", "1")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["training"][0]["dataset"] == str(lines)
    assert len(found["rows"]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my lines.txt", "my recipe.toml", "tokens"]
    lines.unlink()
    gone = dray(*given)
    assert (gone.returncode, gone.stdout) == (78, "")
    assert "the dataset does not exist\n" in gone.stderr
    assert f"  found:  nothing at {lines}\n" in gone.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("nowhere.toml",), "recipe nowhere.toml does not exist"),
        ((), "missing argument 'RECIPE'"),
        ((ROOT / "tests/tiny.toml", "train.steps=1", "--rows", "-1"), "--rows"),
        ((ROOT / "tests/tiny.toml", "train.stesp=1"), "did you mean `steps`?"),
        ((ROOT / "tests/tiny.toml", "train.steps=1", "--engine", "none"), "for '--engine': 'none' is not one of"),
    ],
)
def test_what_is_refused_at_once(argv: tuple[str | Path, ...], said: str) -> None:
    ended = dray(*argv)
    assert (ended.returncode, said in ended.stderr, ended.stdout) == (78, True, ""), ended.stderr


def test_a_command_is_not_ours_to_look_into(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('name = "own"\n[command]\nargv = ["python3", "train.py"]\n')
    ended = dray(recipe)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        78,
        "",
        "dray: the data of a [command] cannot be inspected: only its program knows them\n"
        f"  where:  {recipe}\n"
        "  wanted: a recipe with [train]\n"
        "  fix:    dray recipe new mine.toml writes a recipe for dray's trainer\n",
    )
