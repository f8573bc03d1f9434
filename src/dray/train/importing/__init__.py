"""Checkpoints that other programs wrote, as tensors by name."""
