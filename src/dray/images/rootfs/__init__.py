"""A root filesystem, made by Apptainer and packed as a SIF or a layer. It runs in the builder container too.

Standard library only: the builder has nothing else.
"""

# The program of this package, and what it leaves in its scratch folder.
# -P: nothing of the folder where it starts is imported.
PROGRAM = ("python3", "-P", "-m", "dray.images.rootfs")
ROOTFS = "rootfs"
SIF = "image.sif"
LAYER = "image.tar"
TOOLS = "tools.json"
