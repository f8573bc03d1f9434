"""The model that a run leaves: a folder that `from_pretrained` loads, written from shards."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dray.train import ranks
from dray.train.checkpoint import manifest
from dray.train.config import Config
from dray.train.model import lora
from dray.train.outputs import card, export
from dray.train.parallel.base import Strategy
from dray.train.parallel.ddp import HALF
from dray.train.runtime.heartbeat import heartbeat

_FILE = 2 * 10**9  # bytes of one file, which safetensors copies once more in the host's memory


def save(
    config: Config, strategy: Strategy, tokenizer: Any, *, parameters: int, figures: dict[str, dict[str, float]]  # noqa: ANN401
) -> None:  # fmt: skip
    """Replace the final model when the new one is complete; all ranks call it. A 16-bit run's has its 16 bits."""
    final, network = Path(config.final_model), strategy.network
    adapters = {}
    if lora.on(network):
        adapters = {name: weight.detach().clone() for name, weight in strategy.weights() if ".lora_" in name}
    weights = _weights(strategy, adapters)
    if ranks.rank():
        for _ in weights:  # rank 0 cannot gather alone
            pass
        return
    shell: Any = network
    if adapters:
        lora.save_adapter(network, adapters, final.with_name("adapter"), config.model.name)
        shell = lora.plain(network)
    dtype, part = HALF.get(config.train.precision), final.with_name(f"{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shell.save_pretrained(part, state_dict={})  # its configuration and its own code
        (part / "model.safetensors").unlink(missing_ok=True)
        export.write_weights(part, export.named_as_saved(shell, weights), dtype, limit=_FILE)
        if dtype:
            shell.config.dtype = dtype
            shell.config.save_pretrained(part)
        tokenizer.save_pretrained(part)
        manifest.seal_model(part)
    except Exception:  # a full disk: what was there before has its room again
        shutil.rmtree(part, ignore_errors=True)
        raise
    export.swap(part, final)
    card.write(final, config, parameters=parameters, ranks=ranks.world(), figures=figures)


def _weights(strategy: Strategy, adapters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each whole weight, with its adapter merged."""
    for name, weight in strategy.weights():
        heartbeat.beat()
        if adapters and ranks.rank() == 0:
            yield from lora.merged(strategy.network, {**adapters, name: weight}).items()
        else:
            yield name, weight
