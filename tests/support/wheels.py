"""A wheel of a user's own: a module, a console script, and what it needs of the image."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile


def make(folder: Path, version: str = "1.0", *needs: str) -> Path:
    """`barge`: `import barge` knows where it lies, and `barge` on PATH prints it."""
    about = f"barge-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {one}\n" for one in needs)
    files = {
        "barge/__init__.py": f'VERSION = "{version}"\ndef main():\n    print("barge", VERSION, __file__, __cached__)\n',
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: barge\nVersion: {version}\n{requires}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\nbarge = barge:main\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    folder.mkdir(exist_ok=True)
    path = folder / f"barge-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path
