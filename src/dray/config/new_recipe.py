"""A first recipe, with comments."""

from __future__ import annotations

import json
from dataclasses import dataclass

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

    def text(self) -> str:
        """The text of the recipe."""
        about = "A GPT-2 of 1 M parameters learns from scratch; without model.tokenizer each byte is a token."
        model, length, lr = _SMALL, 128, "4e-3"
        if self.model:
            about = f"{self.model} is trained further."
            model, length, lr = f"[model]\nname = {_toml(self.model)}\n", 512, "5e-5"
        ranks, size = "ranks_per_node = 2 # on CPUs; with GPUs there is a rank for each", 16
        if self.gpus:
            ranks, size = f'image = "{self.image}" # a rank for each GPU', self.gpus * -(-16 // self.gpus)
        return f"""\
# {about}
# `dray recipe keys` prints all keys, and `dray plan RECIPE` what would run.
name = {_toml(self.name)}
{ranks}

[batch]
global_size = {size} # samples of a step, of all ranks together

[data]
train = {_toml(self.train)}
sequence_length = {length}

{model}
[train]
steps = 200
lr = {lr}
warmup_steps = 20
log_every = 10

[checkpoint]
every = 100 # steps
# folder = ...  on a shared disk: the same command then resumes in a new job
"""


def _toml(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
