"""train.master_weights: the model computes with weights of 16 bits, and the optimizer moves their masters of 32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Masters:
    """Sum 16-bit gradients in fp32, over micro-batches and over ranks."""

    def __init__(self, network: torch.nn.Module, dtype: torch.dtype) -> None:
        """The network has its weights of 32 bits, the same on all ranks, and loses them here to their masters."""
        self.of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        for weight in network.parameters():
            master = self.of[weight] = torch.nn.Parameter(weight.detach().float())
            master.grad = self._gradients[weight] = torch.zeros_like(master)
            weight.data = weight.data.to(dtype)

    def add(self) -> None:
        """Add the gradients of a micro-batch that is not reduced over ranks yet."""
        found = {weight: weight.grad for weight in self.of if weight.grad is not None}
        self._add(found)
        torch._foreach_zero_(list(found.values()))  # DDP's buckets are these gradients

    def _add(self, gradients: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        for weight, gradient in gradients.items():
            self._gradients[weight].add_(gradient)

    def reduce(self, bucket: Any) -> Any:  # noqa: ANN401  torch's GradBucket and Future
        """DDP's hook for a bucket of gradients: their mean over ranks, while the backward pass goes on."""
        weights = bucket.parameters()
        own: torch.Tensor = bucket.buffer()
        self._add(dict(zip(weights, bucket.gradients(), strict=True)))
        flat = torch.cat([self._gradients[weight].flatten() for weight in weights])
        sizes = [weight.numel() for weight in weights]

        def share(reduced: Any) -> torch.Tensor:  # noqa: ANN401  torch's Future
            mean: torch.Tensor = reduced.value()[0] / dist.get_world_size()
            for weight, part in zip(weights, torch.split(mean, sizes), strict=True):
                self._gradients[weight].copy_(part.view_as(weight))
            return own

        return dist.all_reduce(flat, async_op=True).get_future().then(share)

    def hand_out(self) -> None:
        """Copy the masters' values into the model's weights."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.of), list(self.of.values()))

    def clear(self) -> None:
        """The step is taken."""
        torch._foreach_zero_(list(self._gradients.values()))
        for weight in self.of:
            weight.grad = None
