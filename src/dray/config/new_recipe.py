"""A first recipe, with comments."""

from __future__ import annotations

import json
from dataclasses import dataclass

_ALL = "# `dray recipe keys` prints all keys, and `dray plan RECIPE` what would run.\n"
_SMALL = """\
[model]
type = "gpt2"

[model.config]
n_layer = 5
n_embd = 128
n_head = 4
n_positions = 128
"""


@dataclass(frozen=True, kw_only=True)
class New:
    """The values of a first recipe; the defaults are for a machine without GPUs."""

    name: str
    train: str = "builtin"
    image: str = "cpu"
    gpus: int = 0
    """GPUs of a node; 0: the recipe is for CPUs."""
    model: str = ""
    """A model of the hub, or a folder that `save_pretrained` wrote; empty: a small model from scratch."""
    keys: bool = False
    """Whether its comments say how to list all keys."""

    def text(self) -> str:
        """The text of the recipe."""
        about = (
            f"# {self.model} is trained further.\n"
            if self.model
            else "# A GPT-2 of 1 M parameters learns from scratch; without model.tokenizer each byte is a token.\n"
        )
        ranks = "ranks_per_node = 2 # on CPUs; with GPUs there is a rank for each"
        return "\n".join(
            [
                about + _ALL * self.keys + f"name = {_toml(self.name)}",
                f'image = "{self.image}" # a rank for each GPU' if self.gpus else ranks,
                "",
                "[batch]",
                f"global_size = {self.gpus * -(-16 // self.gpus) if self.gpus else 16}"
                + " # samples of a step, of all ranks together" * self.keys,
                "",
                "[data]",
                f"train = {_toml(self.train)}",
                f"sequence_length = {512 if self.model else 128}",
                "",
                f"[model]\nname = {_toml(self.model)}\n" if self.model else _SMALL,
                "[train]",
                "steps = 200",
                f"lr = {'5e-5' if self.model else '4e-3'}",
                "warmup_steps = 20",
                *([] if self.gpus else ['precision = "fp32"']),
                "log_every = 10",
                "",
                "[checkpoint]",
                "every = 100" + " # steps" * self.keys,
                *(["# folder = ...  on a shared disk: the same command then resumes in a new job"] * self.keys),
                "",
            ]
        )


def _toml(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
