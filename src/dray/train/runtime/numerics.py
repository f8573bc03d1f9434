"""torch's settings of precision and determinism, made before the model is built."""

from __future__ import annotations

import torch

from dray.train.config import Config


def set_up(config: Config, device: torch.device) -> None:
    """TF32 is only for GPUs: on a CPU oneDNN reads `high` as permission for bf16.

    It is for precision = fp32 alone: what autocast leaves in fp32 is there because it must be exact.

    By the names from before torch 2.9: its new ones, fp32_precision, leave the old ones unreadable, and Inductor reads
    both (seen with 2.9.1 and 2.13).
    """
    if device.type != "cpu":
        tf32 = config.train.tf32 and config.train.precision == "fp32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    if config.train.deterministic:  # planning/environment.py has set the variables that this needs
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
