"""The model that a run leaves: a folder that `from_pretrained` loads, written from shards, and loaded again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from dray.train import objectives, ranks
from dray.train.checkpoint import manifest
from dray.train.config import Config
from dray.train.data.token_cache import IDS, Tokens
from dray.train.errors import say
from dray.train.model import lora
from dray.train.outputs import card, export
from dray.train.parallel.base import Strategy
from dray.train.parallel.ddp import HALF
from dray.train.runtime.heartbeat import heartbeat

_FILE_BYTES = 2 * 10**9  # bytes of one file, which safetensors copies once more in the host's memory
_SAMPLE_TOKENS = 64  # tokens of the sample, for which all ranks wait


def save(
    config: Config, strategy: Strategy, tokenizer: Any, *, parameters: int, figures: dict[str, dict[str, float]]  # noqa: ANN401
) -> None:  # fmt: skip
    """Replace the final model when the new one is complete; all ranks call it. With 16-bit products it has 16 bits."""
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
        export.write_weights(part, export.named_as_saved(shell, weights), dtype, limit=_FILE_BYTES)
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


def sample(config: Config, validation: Tokens, device: torch.device) -> str:
    """Load the saved model as a user would, and return what it generates; empty if it does not fit, or is masked."""
    final, objective = Path(config.final_model), objectives.named(config.train.objective)
    size = sum(path.stat().st_size for path in final.glob("*.safetensors"))
    if device.type != "cpu":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] < 1.25 * size:  # a quarter to generate with
            say(f"the final model is not loaded again: {size / 1e9:.1f} GB do not fit beside the training on this GPU")
            return ""
    code = config.model.trust_remote_code
    tokenizer: Any = AutoTokenizer.from_pretrained(final, trust_remote_code=code)
    network: Any = objective.auto_model.from_pretrained(final, trust_remote_code=code).eval().to(device)
    if not objective.predicts_next:
        return ""
    length = config.data.sequence_length
    prompt = torch.from_numpy(validation.slice(0, max(1, length // 4))[None] & IDS).to(device)
    text = network.generate(
        prompt,
        max_new_tokens=min(length // 2, _SAMPLE_TOKENS),
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return str(tokenizer.decode(text[0], skip_special_tokens=True))
