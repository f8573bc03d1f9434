"""DeepSpeed's ZeRO behind the same few words as ddp and fsdp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from dray.train.config import Config
from dray.train.parallel import adamw

_TAG = "state"


class Zero:
    """Stages 1, 2 and 3; `train.offload` puts the optimizer, or weights too, into the host's memory."""

    def __init__(self, network: torch.nn.Module, config: Config, device: torch.device) -> None:
        self.device, self.network, self._stage = device, network, int(config.strategy.removeprefix("zero"))
        place = {"device": "cpu"}
        stage: dict[str, Any] = {"stage": self._stage}
        stage |= {"offload_optimizer": place} if config.offload in ("optimizer", "all") else {}
        stage |= {"offload_param": place} if config.offload == "all" else {}
        said = {
            "train_micro_batch_size_per_gpu": config.per_device,
            "gradient_accumulation_steps": config.accumulation,
            "gradient_clipping": config.clip,
            "bf16": {"enabled": config.precision == "bf16"},
            "zero_optimization": stage,
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW resumes to the last bit, DeepSpeed's does not
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 40,
        }
        optimizer = adamw(network, config, fused=False)
        self._engine: Any = deepspeed.initialize(model=network, optimizer=optimizer, config=said)[0]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._engine(input_ids=rows, use_cache=False).logits
        return found

    @contextmanager
    def turn(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)  # divides by the accumulation itself

    def update(self, rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm() or 0.0)

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=_TAG)

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag=_TAG)

    def weights(self) -> dict[str, Any]:
        # Weights that are tied have one name here, as in a file of transformers: by two they would come apart.
        names = {name for name, _ in (*self.network.named_parameters(), *self.network.named_buffers())}
        parts = list(self.network.parameters()) if self._stage == 3 else []
        with deepspeed.zero.GatheredParameters(parts, modifier_rank=None):
            if dist.get_rank() != 0:
                return {}
            state = self.network.state_dict()
            return {name: state[name].detach().cpu().clone() for name in state if name in names}
