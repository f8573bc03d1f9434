"""The locks of images and of .venv: the hash of every file, as `dray image lock` writes them."""
