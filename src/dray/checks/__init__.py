"""Checks what an image can do on this machine: `python -m dray.checks` in the image, with or without a GPU."""
