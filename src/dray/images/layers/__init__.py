"""A layer: a user's own Python packages in a small SIF of their own, bound into the container beside the image.

`make` runs on the host. The module itself is a program for where Apptainer is, as that of dray.images.rootfs.
"""

PROGRAM = ("python3", "-P", "-m", "dray.images.layers")
SIF = "layer.sif"
TREE = "tree"
