"""result.json: what dray writes is valid by the published schema; one of before is read, one to come is not."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from damage import RECORD
from dray.cli.runs import status_text
from dray.facts import Facts
from dray.runs import result
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.report import why
from dray.runs.status import Stop
from dray.runs.status import status as status_of
from dray.runs.store import RunPaths
from helpers import ROOT

FACTS = Facts(scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")
EVENTS = (
    {"event": "start", "time": 5.0, "first_step": 0, "steps": 50},
    {"event": "step", "time": 10.0, "step": 20, "loss": 3.5},
    {"event": "slow", "time": 11.0, "step": 20, "rank": 1, "node": "n1", "times": 1.5},
    {"event": "checkpoint", "time": 12.0, "checkpoint": 20, "saved": True, "seconds": 1.5},
    {"event": "eval", "time": 20.0, "step": 20, "loss": None, "perplexity": None},
    {"event": "end", "time": 30.0, "tokens_per_s": 12.5, "train_seconds": 9.0, "sample": "a \x1b"},
)


def begun(runs: Path, *words: str) -> RunPaths:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ("max_requeues=3", *words))
    paths = write(recipe, FACTS, runs=runs, run="mine")[1]
    paths.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in EVENTS))
    return paths


def schema() -> dict[str, object]:
    return json.loads((ROOT / "docs" / "reference" / "result.schema.json").read_text(encoding="utf-8"))


@pytest.mark.seconds
def test_what_is_written_is_valid(tmp_path: Path) -> None:
    """After a stop, a restart and a failure, a success, and with nothing left; each attempt with those before it."""
    stopped = begun(tmp_path)
    (stopped.checkpoints / "step-20").mkdir()
    finish(stopped, code=75, stopped=Stop("the time limit", "2026-11-24T05:00:00Z"), batch=True)
    failed = begun(tmp_path)
    restart = failed.failures / "restart-1"
    restart.mkdir()
    for folder in (failed.failures, restart):
        (folder / "rank-3.json").write_text(json.dumps(RECORD))
    failed.failing_nodes.write_text("n1\n")
    finish(failed, code=1, batch=True)
    done = begun(tmp_path)
    done.final_model.mkdir()
    (done.final_model / "config.json").write_text("{}")
    done.rank_log(0).write_text("")
    finish(done, code=0)
    empty = begun(tmp_path)
    for path in (empty.plan, empty.metrics):
        path.unlink()
    finish(empty, code=69)
    written = [json.loads(paths.result.read_text()) for paths in (stopped, failed, done, empty)]
    assert [one["status"] for one in written] == ["stopped", "failed", "done", "failed"]
    assert [len(one["history"]) for one in written] == [0, 1, 2, 3]
    assert written[0]["next"]["requeue"]
    assert written[1]["restart_cause"]
    assert written[2]["warnings"] == ["slow: rank 1 on n1, 1.50 times the median rank"]
    for one in written:
        jsonschema.validate(one, schema(), jsonschema.Draft202012Validator)
        assert next(iter(one.items())) == ("version", 1)
        assert set(one) == set(schema()["properties"])  # type: ignore[call-overload]
    with pytest.raises(jsonschema.ValidationError, match="1 was expected"):
        jsonschema.validate(written[0] | {"version": 2}, schema(), jsonschema.Draft202012Validator)


def test_one_of_before_there_was_a_version(tmp_path: Path) -> None:
    paths = begun(tmp_path)
    told = json.loads(finish(paths, code=1).model_dump_json())
    del told["version"]
    paths.result.write_text(json.dumps(told | {"a key of later": 1}))
    assert result.read(paths.result) == finish(paths, code=1).model_copy(update={"finished": told["finished"]})


@pytest.mark.hostile("result")
@pytest.mark.parametrize("version", [2, 0, "1", None, [], 1e999, "\x1b[2J" * 20])
def test_one_of_another_version_is_named_and_nothing_of_it_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: object
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    paths = begun(tmp_path)
    told = json.loads(finish(paths, code=1).model_dump_json())
    paths.result.write_text(json.dumps(told | {"version": version, "status": "done"}))
    if version == 1e999:
        version = float("inf")
    wrong = f"{paths.result} cannot be read: result version {ascii(version)[:40]}, but this dray reads 1"
    seen = status_of(paths.run, closely=True)
    assert seen.state in ("no result", "running")
    assert wrong in seen.warnings
    assert f"warning: {wrong}" in status_text(seen)
    assert wrong in why.look(paths).warnings
    assert result.result_of(paths) is None
