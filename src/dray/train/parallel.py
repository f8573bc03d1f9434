"""How one model is on many ranks. The loop asks for a loss, hands it back, and has the weights moved; no more.

ddp: each rank has all of it. fsdp: each has a part of weights, gradients and optimizer. zero1 to zero3: DeepSpeed's
stages (zero.py). Whatever it is, a checkpoint holds the same tensors by the same names, so that any can go on from any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dray.train import dropout, lora
from dray.train.config import Config
from dray.train.objective import Batch, Objective
from dray.train.scaler import Scaler
from dray.train.stop import stop

State = dict[str, dict[str, torch.Tensor]]
"""`weights`, and AdamW's `exp_avg` and `exp_avg_sq`; each by the weights' names. `others` are the model's buffers."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Parallel(Protocol):
    """What the loop, evaluation and checkpoints know of it."""

    device: torch.device
    network: torch.nn.Module
    scaler: Scaler | None

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass: the sum of the losses, and in evaluation how many targets were hit, and whole rows."""

    def turn(self, *, last: bool) -> Any:  # noqa: ANN401  a context manager
        """Around one forward and backward pass; gradients are summed over ranks in a step's last one alone."""

    def backward(self, loss: torch.Tensor) -> None:
        """One backward pass. The step's gradient is the mean over ranks of the sum over passes."""

    def update(self, rate: float) -> torch.Tensor:
        """Move the weights at this learning rate; the gradients' norm before they were clipped."""

    def state(self) -> State:
        """Copies of what a checkpoint holds, in the host's memory: parts of tensors, or some of the whole ones."""

    def load(self, read: Callable[[State], None], updates: int) -> None:
        """The same back, on any number of ranks: `read` fills the tensors that it is given."""

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, on the first rank."""

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The whole of it, as the model has it, in 32 bits."""

    def clamp(self, weight: torch.nn.Parameter, bound: torch.Tensor) -> None:
        """No part of it beyond this, wherever it is kept; the bound is one number, or one for each row."""

    def write(self, weight: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Another value for it, wherever it is kept; each rank has the same."""


def begin(config: Config) -> tuple[torch.device, dist.ProcessGroup]:
    """Meet the other ranks; the device that is this one's, and a group that waits as long as it takes.

    nccl's own gives up after ten minutes. Making tokens, reading weights and writing checkpoints may take longer.
    """
    on_cpu = config.variant == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    return device, dist.new_group(backend="gloo", timeout=timedelta(days=7))


def check_same(network: torch.nn.Module, patient: dist.ProcessGroup) -> None:
    """Wait until all ranks have the network, and see that it is the same: else weights would go astray."""
    named = (*network.named_parameters(), *network.named_buffers())
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    first = [mine]
    dist.broadcast_object_list(first, src=0, group=patient)
    same: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(same, first[0] == mine, group=patient)
    if not all(same):
        stop(
            "the ranks have built different networks",
            wanted="the first rank's weights, as its files have them",
            found=f"others on rank {', '.join(str(rank) for rank, one in enumerate(same) if not one)}",
            fix="is tie_word_embeddings in the model's config.json as its weights are?",
        )


def make(network: torch.nn.Module, config: Config, device: torch.device) -> Parallel:
    """As the recipe's train.strategy says. The first rank's weights become everybody's."""
    objective = Objective(network)
    if config.compile and device.type == "cpu":
        dropout.install(network)
    if config.compile:
        objective.compile()
    if config.strategy.startswith("zero"):
        from dray.train.zero import Zero  # noqa: PLC0415  importing DeepSpeed takes a second

        return Zero(objective, config, device)
    return Torch(objective, config, device)


def adamw(network: torch.nn.Module, config: Config, *, fused: bool = True) -> torch.optim.AdamW:
    """The one optimizer of all strategies. Biases and norms are not drawn to zero."""
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def buffers(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that a checkpoint holds."""
    kept = network.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in network.named_buffers() if name in kept}


class Torch:
    """ddp and fsdp."""

    def __init__(self, objective: Objective, config: Config, device: torch.device) -> None:
        self.device, self.config, self.network = device, config, objective.network
        self.scaler = Scaler(config.initial_loss_scale) if config.precision == "fp16" else None
        half = _HALF.get(config.precision)
        self._half = torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None)
        self._module: torch.nn.Module = objective
        if config.strategy == "fsdp":
            self._shard(half)
        else:
            self.network.to(device)
            if dist.get_world_size() > 1:
                ids = None if device.type == "cpu" else [device.index]
                self._module = DistributedDataParallel(objective, device_ids=ids, gradient_as_bucket_view=True)
        self._optimizer = adamw(self.network, config)
        self._prime(updates=0)
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def _prime(self, updates: int) -> None:
        """Give AdamW its averages now: a checkpoint may be loaded, or written, before a step was taken."""
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                moments = {moment: torch.zeros_like(weight) for moment in MOMENTS}
                step = torch.tensor(float(updates), device=weight.device)
                self._optimizer.state[weight] = {"step": step, **moments}

    def _shard(self, half: torch.dtype | None) -> None:
        """Layer by layer, so that no rank ever has more than one whole layer beside its parts."""
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for module in (*_layers(self.network), self.network):
            for tensor in (*module.parameters(), *module.buffers()):
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(self.device)
                    dist.broadcast(tensor.data, 0)
            fully_shard(module, mp_policy=policy)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with self._half:
            found: tuple[torch.Tensor, torch.Tensor] = self._module(batch.rows, batch.targets, batch.positions)
        return found

    @contextmanager
    def turn(self, *, last: bool) -> Iterator[None]:
        # FSDP sums in each pass: without that it would hold the whole gradient.
        if isinstance(self._module, DistributedDataParallel) and not last:
            with self._module.no_sync():
                yield
        else:
            yield

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss * self.scaler.scale if self.scaler else loss)

    def update(self, rate: float) -> torch.Tensor:
        weights = [weight for weight in self.network.parameters() if weight.grad is not None]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if self.scaler:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.scaler is None or norm.isfinite():
            if self.config.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(weights, self.config.max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            if self.scaler:
                self.scaler.good()
        else:
            self.scaler.bad()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> State:
        copies: Any = self._stager.stage(self._share())
        return copies  # type: ignore[no-any-return]

    def _share(self) -> State:
        if isinstance(self.network, FSDPModule):
            return self._tensors()
        # Every rank has all of it, and each keeps a share, so that they hold and write it once between them.
        mine, count = dist.get_rank(), dist.get_world_size()
        return {kind: dict(list(named.items())[mine::count]) for kind, named in self._tensors().items()}

    def _tensors(self) -> State:
        named = dict(self._named())
        if lora.on(self.network):  # the others are the model's own, and stay so
            named = {name: weight for name, weight in named.items() if weight.requires_grad}
        state = {"weights": {name: weight.detach() for name, weight in named.items()}}
        for moment in MOMENTS:
            state[moment] = {
                name: self._optimizer.state[weight][moment] for name, weight in named.items() if weight.requires_grad
            }
        return {**state, "others": buffers(self.network)}

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after an evaluation some are whole still
        return self.network.named_parameters()

    def load(self, read: Callable[[State], None], updates: int) -> None:
        self._prime(updates)
        read(self._tensors())

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        return weight.detach().float()

    def clamp(self, weight: torch.nn.Parameter, bound: torch.Tensor) -> None:
        weight.data.clamp_(-bound, bound)

    def write(self, weight: torch.nn.Parameter, value: torch.Tensor) -> None:
        weight.data.copy_(value)

    def weights(self) -> dict[str, torch.Tensor]:
        first = dist.get_rank() == 0
        found = {}
        for name, weight in (*self._named(), *buffers(self.network).items()):
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if first:
                found[name] = whole.detach().cpu()
        return found


def _layers(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that repeat: the longest list of modules that the network has."""
    lists = [list(module) for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])
