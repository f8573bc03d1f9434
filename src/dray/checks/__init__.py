"""What an image can do on the machine where it runs; `python -m dray.checks` in the image, with or without a GPU."""
