"""GPT-2 124M as a person writes it for one GPU, without a library's trainer: the speed that dray is compared with."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Clock:
    """The times between steps, by the GPU's own clock: it never makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._marks = device.type == "cuda", list[Any]()
        self._host: list[float] = []

    def mark(self) -> None:
        """After a step, and once before the first."""
        self._host.append(time.monotonic())
        if self._on_gpu:
            if len(self._marks) == 1:  # the first step's end alone is waited for: it compiles
                torch.cuda.synchronize()
                self._host[-1] = time.monotonic()
            event = torch.cuda.Event(enable_timing=True)
            event.record()  # type: ignore[no-untyped-call]
            self._marks.append(event)
        else:
            self._marks.append(self._host[-1])

    def figures(self, warm: int, tokens: int, flops: float, attention: float, peak: float) -> dict[str, Any]:
        """Of all steps after the first `warm`; MFU is of the median step. `attention` is its part of the FLOPs."""
        if self._on_gpu:
            torch.cuda.synchronize()
        marks = self._marks[warm:]
        if self._on_gpu:
            times = sorted(begin.elapsed_time(end) for begin, end in pairwise(marks))
        else:
            times = sorted(1e3 * (end - begin) for begin, end in pairwise(marks))
        median = times[len(times) // 2]
        speed = tokens / median * 1e3
        return {
            "tokens_per_s": speed,
            "ms": [times[0], median, times[-1]],
            "steps": len(times),
            "mfu": speed * flops / peak if peak else 0.0,
            "mfu_causal": speed * (flops - attention / 2) / peak if peak else 0.0,
            "first_s": self._host[1] - self._host[0] - median / 1e3,
            "allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if self._on_gpu else 0.0,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if self._on_gpu else 0.0,
        }


def peak(device: torch.device) -> float:
    """The maker's bf16 operations a second; 0 where they are unknown."""
    from dray.contract import hardware  # noqa: PLC0415  on the path once the suite has begun

    gpu = hardware.find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return gpu.bf16 * 1e12 if gpu else 0.0


def flops(model: nn.Module, layers: int, width: int, length: int) -> tuple[float, float]:
    """Of a token, forward and backward, and attention's part of it, which is counted whole."""
    attention = 12.0 * layers * width * length
    return 6.0 * sum(weight.numel() for weight in model.parameters()) + attention, attention


class Layer(nn.Module):
    """Attention and a feed-forward network, each after its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Of the same shape."""
        rows, length, width = hidden.shape
        parts = self.attend(self.attention_norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.feed(self.feed_norm(hidden))


class Model(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        inputs, labels = ids[:, :-1], ids[:, 1:]
        places = torch.arange(inputs.shape[1], device=ids.device)
        hidden = self.norm(self.layers(self.tokens(inputs) + self.positions(places)))
        logits = functional.linear(hidden, self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(rows: int, length: int, warm: int, steps: int, small: bool) -> dict[str, Any]:
    """The figures of its steps; small is for a CPU, and not compiled."""
    device = torch.device("cpu" if small else "cuda")
    torch.set_float32_matmul_precision("high")
    vocabulary, width, layers, heads = (512, 32, 2, 2) if small else (50304, 768, 12, 12)
    torch.manual_seed(1)
    with device:
        model = Model(vocabulary, length, width, layers, heads)
    count, attention = flops(model, layers, width, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if not small:
        model.compile()
    batches = torch.randint(256, (warm + steps, rows, length + 1))
    if not small:
        batches = batches.pin_memory()
    clock = Clock(device)
    clock.mark()
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch.to(device, non_blocking=True))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
    return clock.figures(warm, rows * length, count, attention, peak(device))
