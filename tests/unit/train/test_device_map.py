"""A model larger than one device: where its layers are, and that `dray model` computes the same with it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray import cli  # noqa: E402
from dray.cli import model as verbs  # noqa: E402
from dray.contract import image_tasks  # noqa: E402
from dray.contract.findings import ConfigError  # noqa: E402
from dray.train import manifest  # noqa: E402
from dray.train.data import tokenizer  # noqa: E402
from dray.train.model import build  # noqa: E402
from dray.train.outputs import generate  # noqa: E402
from trainings import GPT, Forks, config  # noqa: E402

pytestmark = pytest.mark.torch
SMALL = {"cpu": "100KB"}  # of 0.44 MB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's final model of eight layers, and its plan beside it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        chosen = config(folder, model=[*GPT, "model.config.n_layer=8"])
        build.build(chosen, tokenizer.load(chosen), filled=True).save_pretrained(folder / "final")
    tokenizer.load(chosen).save_pretrained(folder / "final")
    manifest.seal_model(folder / "final")
    return folder / "final"


def placing(folder: Path | str = "", memory: dict[str, str] | None = None) -> dict[str, Any]:
    return {"max_memory": memory or {}, "offload_folder": str(folder)}


def made(model: Path, capsys: pytest.CaptureFixture[str], how: dict[str, Any] | None) -> list[str]:
    generate.run(image_tasks.Generate(str(model), "causal", "one: ", 8, 0.0, 0, trust_remote_code=False, placing=how))
    return capsys.readouterr().out.splitlines()


def test_all_in_the_host_s_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, (head, *text) = made(model, capsys, None), made(model, capsys, placing())
    assert head == "device_map: cpu: 8 of 8 layers, 0.000444 GB"
    assert text == plain


def test_the_rest_goes_to_the_disk_where_it_is_asked_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = made(model, capsys, None)
    lines = made(model, capsys, placing(tmp_path / "off", SMALL))
    heads = [line for line in lines if line.startswith("device_map: ")]
    assert [line.split()[1] for line in heads] == ["cpu:", "disk:"]
    assert sum(int(line.split()[2]) for line in heads) == 8
    assert int(heads[1].split()[2]) > 0
    assert lines[2:] == plain
    assert not [*(tmp_path / "off").iterdir()], "what was written there is gone"


def test_and_nowhere_else(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="its rest would go to the disk") as refused:
        made(model, capsys, placing("", SMALL))
    assert "disk: " in refused.value.details["found"]
    assert refused.value.details["fix"] == "--offload-folder DIR, or more memory: --max-memory"


@pytest.mark.slow
def test_an_evaluation_has_the_same_figures(model: Path, tmp_path: Path) -> None:
    plan, forks, found = json.loads(next(model.parent.glob("run/attempt-1/plan.json")).read_text()), Forks(), []
    try:
        for how in (None, placing(tmp_path / "off", SMALL)):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            env |= {"RANK": "0", "LOCAL_RANK": "0", "DRAY_NODE_NAME": "n"}
            found.append(forks.job(image_tasks.Evaluate(str(model), plan, how), tmp_path / "job", **env))
    finally:
        forks.close()
    (code, plain), (placed_code, placed) = found
    assert (code, placed_code) == (0, 0), plain + placed
    assert [line.split(": ")[1] for line in placed.splitlines()[:2]] == ["cpu", "disk"]
    assert placed.splitlines()[2:] == plain.splitlines()
    assert "perplexity" in plain


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--device-map", "auto", "--max-memory", "cpu"], "--max-memory has a wrong value"),
        (["--device-map", "auto", "--max-memory", "cpu=-1GB"], "--max-memory has a wrong value"),
        (["--device-map", "auto", "--max-memory", "gpu0=1GB"], "--max-memory has a wrong value"),
        (["--device-map", "auto", "--max-memory", "disk=1GB"], "--max-memory has a wrong value"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "eval"])
def test_what_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    options: list[str],
    problem: str,
) -> None:
    chosen = verbs.one_off_job.Recipe.model_validate({"name": "one", "command": {"argv": ("true",)}})

    class Plan:
        recipe = chosen

    monkeypatch.setattr(verbs.one_off_job, "ended", lambda *_, **__: (Plan, tmp_path))
    assert cli._code(["model", verb, str(tmp_path), *options]) == 78
    assert problem in capsys.readouterr().err
