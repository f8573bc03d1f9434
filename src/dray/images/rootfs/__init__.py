"""Make a root filesystem with Apptainer, and pack it as a SIF or a Docker image. Runs in the builder container too.

Standard library only: the builder has nothing else.
"""

# The program of this package, and what it leaves in its scratch folder.
# -P: nothing of the folder where it starts is imported.
PROGRAM = ("python3", "-P", "-m", "dray.images.rootfs")
ROOTFS = "rootfs"
# How a Docker image tells what it was made from.
INPUTS_LABEL = "dray.inputs"
SIF = "image.sif"
LAYER = "image.tar"
TOOLS = "tools.json"
