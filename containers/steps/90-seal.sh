#!/usr/bin/env bash
# What only the build needed goes; Python is compiled; what the image holds is written down; the image shows that it works.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

# A sealed image installs nothing; what came as files of debs/ counts as wanted, and apt removes it by name only.
"$VENV/bin/python3" -m pip uninstall --quiet --yes pip
apt::get purge --yes "python$DRAY_PYTHON-venv" python3-pip-whl python3-setuptools-whl
apt::get clean

# Compiled here, since an image is read-only at run time and every rank would compile again. Unchecked hashes: no time
# gets into the bytes, and no import looks at the source's, a lookup in a mounted image. -f, for what a step has imported
# or Debian has compiled holds times, which no source has any more once the image is packed. As with pip, sources for other
# Pythons may fail.
"$VENV/bin/python3" -m compileall -qq -f -j 0 --invalidation-mode unchecked-hash \
    "$VENV/lib" "/usr/lib/python$DRAY_PYTHON" || true

"$VENV/bin/python3" - "$VENV/image.json" <<'PYTHON'
import json
import os
import platform
import sys
from importlib.metadata import distributions, version

image = {
    "variant": os.environ["DRAY_VARIANT"],
    "accelerator": os.environ["DRAY_ACCELERATOR"],
    "architectures": [one for one in os.environ["DRAY_ARCHITECTURES"].split(";") if one],
    "driver": os.environ["DRAY_DRIVER"] or None,
    "base": os.environ["DRAY_BASE"],
    "dray": version("dray"),
    "python": platform.python_version(),
    "packages": dict(sorted((found.name.lower(), found.version) for found in distributions())),
}
with open(sys.argv[1], "w") as out:
    json.dump(image, out, indent=2)
    out.write("\n")
PYTHON
"$VENV/bin/python3" "$(dirname "$0")/sbom.py" "$VENV/sbom.json"

# Never /tmp, /var/tmp or a home folder: while Apptainer builds, they are the host's.
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/debconf/*-old /var/cache/ldconfig/* /var/lib/dpkg/*-old
find /var/log -type f -delete

"$VENV/bin/python3" - <<'PYTHON'
import importlib
import pkgutil

import torch

import dray

for room in pkgutil.walk_packages(dray.__path__, "dray."):
    if not room.name.endswith(".__main__"):
        try:
            importlib.import_module(room.name)
        except ModuleNotFoundError as missing:
            if missing.name != "aihwkit_lightning":  # it pins torch, and is where that one is
                raise
print(f"dray: dray {dray.__version__} and torch {torch.__version__} import")
PYTHON
