"""A model larger than one device: where its layers are, and that `dray model` computes the same with it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.contract.findings import ConfigError  # noqa: E402
from dray.contract.trainer import image_tasks  # noqa: E402
from dray.train.checkpoint import manifest  # noqa: E402
from dray.train.data import tokenizer  # noqa: E402
from dray.train.model import build  # noqa: E402
from dray.train.outputs import generate  # noqa: E402
from trainings import GPT, Forks, config  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's final model of eight layers, and its plan beside it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        chosen = config(folder, model=[*GPT, "model.config.n_layer=8"])
        build.build(chosen, tokenizer.load(chosen), with_weights=True).save_pretrained(folder / "final")
    tokenizer.load(chosen).save_pretrained(folder / "final")
    manifest.seal_model(folder / "final")
    return folder / "final"


def made(model: Path, capsys: pytest.CaptureFixture[str], *, device_map_options: bool) -> list[str]:
    generate.run(image_tasks.Generate(str(model), "causal", "one: ", 8, 0.0, 0, False, device_map_options))
    return capsys.readouterr().out.splitlines()


def test_all_in_the_host_s_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, (head, *text) = made(model, capsys, device_map_options=False), made(model, capsys, device_map_options=True)
    assert head == "device_map: cpu: 1 module"
    assert text == plain


def test_nothing_goes_to_the_disk() -> None:
    network = SimpleNamespace(device="cpu", hf_device_map={"wte": 0, "h.0": 0, "h.1": "cpu", "h.2": "disk"})
    with pytest.raises(ConfigError, match="the model does not fit into the memory of this machine") as refused:
        generate.require_in_memory(network)
    assert refused.value.details["found"] == "0: 2 modules, cpu: 1 module, disk: 1 module"


@pytest.mark.slow
def test_an_evaluation_has_the_same_figures(model: Path, tmp_path: Path, forks: Forks) -> None:
    plan, found = json.loads(next(model.parent.glob("run/attempt-1/plan.json")).read_text()), []
    for placed in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"RANK": "0", "LOCAL_RANK": "0", "DRAY_NODE_NAME": "n"}
        found.append(forks.job(image_tasks.Evaluate(str(model), plan, placed), tmp_path / "job", **env))
    (code, plain), (placed_code, output) = found
    assert (code, placed_code) == (0, 0), plain + output
    assert output.splitlines()[0].startswith("device_map: cpu: ")
    assert output.splitlines()[1:] == plain.splitlines()
    assert "perplexity" in plain
