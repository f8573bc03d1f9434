"""A layer's lock: the user's requirements, resolved so that none of the image's packages changes."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile, ZipInfo

from dray import process
from dray.config.image_definition import Image
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images.locks import lock, uv
from dray.images.locks.lock import Pin

# uv resolves against empty wheels instead of the image's packages: it asks no index for them (some are on none), and it
# can choose no other version.
_STAND_IN = "dray"
_NEEDS = "# needs "


def update(
    path: Path,
    requirements: Sequence[str],
    image: Image,
    packages: Iterable[Pin],
    *,
    wheels: Path | None = None,
    upgrade: bool = False,
) -> None:
    """Write the lock, unless it was made from the same requirements and image already."""
    packages = list(packages)
    origins = {
        "requirements": lock.digest("\n".join(requirements)),
        "image": lock.digest("".join(f"{pin.name}=={pin.version}\n" for pin in packages)),
    }
    if path.exists() and not upgrade and lock.about(path)[1] == origins:
        lock.require_made_from(path, origins)
        return
    with TemporaryDirectory(prefix="dray-") as made:
        pins = _resolved(Path(made), requirements, image, packages, wheels=wheels)
    ours = {pin.name: pin.version for pin in packages}
    needs = "".join(f"{_NEEDS}{pin.name}=={ours[pin.name]}\n" for pin in pins if pin.name in ours)
    lines = needs + "".join(f"{pin}\n" for pin in pins if pin.name not in ours)
    lock.write(path, origins, lines)


def needs(path: Path) -> dict[str, str]:
    """The image's packages that a layer depends on, in the versions that it was locked for."""
    lines = files.text(path, "the layer's lock").splitlines()
    pins = (line.removeprefix(_NEEDS).partition("==") for line in lines if line.startswith(_NEEDS))
    return {name: version for name, _, version in pins}


def unfit(wanted: Mapping[str, str], image: Mapping[str, str]) -> list[str]:
    """The image's packages whose versions differ from those that the layer was locked for."""
    return [
        f"{name} {image.get(name, 'none')} instead of {version}"
        for name, version in wanted.items()
        if image.get(name, "none").partition("+")[0] != version.partition("+")[0]
    ]


def _resolved(
    scratch: Path, requirements: Sequence[str], image: Image, packages: Sequence[Pin], *, wheels: Path | None
) -> list[Pin]:
    stand_ins, asked, held, out = (scratch / name for name in ("wheels", "asked", "held", "out"))
    stand_ins.mkdir()
    held.write_text("".join(f"{pin.name}=={_stand_in(stand_ins, pin)}\n" for pin in packages))
    asked.write_text("".join(f"{line}\n" for line in requirements))
    done = process.run(
        [
            *(*uv.compiler(), "--python-version", image.python),
            *("--python-platform", f"{platform.machine()}-manylinux_2_28", "--only-binary", ":all:"),
            *("--constraint", held, "--find-links", stand_ins, *(("--find-links", wheels) if wheels else ())),
            *("--no-emit-find-links", "--output-file", out, asked),
        ],
        env=uv.ENVIRONMENT,
        check=False,
    )
    if done.code != 0:
        raise _refused(requirements, packages, done.err.replace(f"+{_STAND_IN}", ""))
    return lock.read(out)


def _refused(requirements: Sequence[str], packages: Iterable[Pin], text: str) -> Exception:
    held = [pin for pin in packages if re.search(rf"(?<![\w-]){re.escape(pin.name)}(?![\w-])", text)]
    where = ", ".join(requirements)
    if "Failed to fetch" in text or not held:
        return uv.unsolved(where, text)
    return ConfigError(
        "these packages conflict with the image's",
        where=where,
        wanted="packages that work with " + ", ".join(f"{pin.name} {pin.version}" for pin in held),
        found=re.sub(r"\n\s*", "\n", text.strip()),
        fix="change the requirement: a layer cannot replace the image's packages",
    )


def _stand_in(folder: Path, pin: Pin) -> str:
    """Write an empty wheel. Its version, which is returned, satisfies what the package's own satisfies."""
    version = f"{pin.version}{'.' if '+' in pin.version else '+'}{_STAND_IN}"
    name = pin.name.replace("-", "_")
    about = f"{name}-{version}.dist-info"
    files = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {pin.name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: dray\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(ZipInfo(path), text)
    return version


def name_of(requirements: Sequence[str]) -> str:
    """A layer's default name: its packages' names."""
    names = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in requirements]
    return re.sub(r"[-_.]+", "-", "-".join(names)).lower()
