"""Checkpoints: write, find, verify and read them, and copy them elsewhere."""
