"""Plan -> text: node.sh, the options of srun and sbatch, what `dray plan` prints. Only this room quotes for bash."""

from __future__ import annotations

from dray.render.node import engine_files, engine_options, enter_script, node_script, srun_options
from dray.render.text import summary, text

__all__ = [
    "engine_files",
    "engine_options",
    "enter_script",
    "node_script",
    "srun_options",
    "summary",
    "text",
]
