"""A layer: a user's own Python packages in a small SIF, bound into the container beside the image.

`make` runs on the host. The package is also a program, which runs where Apptainer is, like dray.images.rootfs.
"""

PROGRAM = ("python3", "-P", "-m", "dray.images.layers")
SIF = "layer.sif"
TREE = "tree"
