"""The MB of an image's locked wheels: summed when they are locked, so that a build can check the free space."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.config.image import Image
from dray.contract.files import write_atomic
from dray.contract.findings import ConfigError
from dray.images.sources import lock

# The guess for a variant that was never built: CUDA's wheels unpack to 1.7 times their size, ROCm's to three times.
_UNPACKED = 3


def digests(checkout: Path, image: Image) -> list[str]:
    """The digests in the heads of a variant's locks."""
    folder = checkout / "containers" / image.variant
    files = [folder / name for name in ("requirements.lock", "build.lock")]
    heads = [re.search(r"^# lines (\w+)$", file.read_text(), re.MULTILINE) for file in files if file.exists()]
    return [head[1] for head in heads if head]


def update(checkout: Path, image: Image) -> list[str]:
    """Write the sum into image.toml, if the locks have changed since. Returns what changed."""
    locks = digests(checkout, image)
    vendors = {vendor.name: vendor.mb or 0 for vendor in image.vendor}
    if image.size and image.size.locks == locks:
        return []
    if missing := [name for name, mb in vendors.items() if not mb]:
        raise ConfigError(
            "the size of a vendor's wheel is not known",
            where=checkout / "containers" / image.variant / "image.toml",
            wanted="mb = MEGABYTES in its [[vendor]]",
            found=f"none for {', '.join(missing)}",
            fix="curl --head URL-OF-THE-WHEEL shows its Content-Length",
        )
    total = sum(vendors.values()) + _listed(checkout, image)
    file = checkout / "containers" / image.variant / "image.toml"
    write_atomic(file, written(file.read_text(encoding="utf-8"), locks, total))
    before = image.size.wheels_mb if image.size else 0
    return [f"wheels {before} -> {total} MB"] if before != total else []


def written(text: str, locks: list[str], wheels_mb: int) -> str:
    """The text of image.toml with these two values in its [size]."""
    lines = {"locks": json.dumps(locks), "wheels_mb": str(wheels_mb)}
    if not re.search(r"^\[size\]", text, re.MULTILINE):
        guess = (
            f"unpacked_mb = {_UNPACKED * wheels_mb} # a guess: correct both once it is built\nsif_mb = {wheels_mb}\n"
        )
        return text.rstrip() + "\n\n[size]\n" + "".join(f"{key} = {lines[key]}\n" for key in lines) + guess
    for key, value in lines.items():
        text = re.sub(rf"(?m)^{key} = (\[.*?\]|\d+)", f"{key} = {value}", text)
    return text


def _listed(checkout: Path, image: Image) -> int:
    """MB of the wheels of the main index, by the sizes that it names."""
    folder = checkout / "containers" / image.variant
    others = {vendor.name for vendor in image.vendor}
    files = [folder / name for name in ("requirements.lock", "build.lock")]
    pins = {pin.name: pin for file in files if file.exists() for pin in lock.read(file)}
    with TemporaryDirectory(prefix="dray-") as scratch:
        asked, answer = Path(scratch) / "asked.in", Path(scratch) / "pylock.toml"
        asked.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins.values() if pin.name not in others))
        argv = [
            *(lock.uv(), "pip", "compile", "--quiet", "--no-header", "--no-deps", "--format", "pylock.toml"),
            *("--python-version", image.python, "--python-platform", lock.PLATFORM),
            *("--only-binary", ":all:", "--no-binary", lock.SOURCE_ONLY, "--output-file", str(answer), str(asked)),
        ]
        done = process.run(argv, env=lock.UV_ENVIRONMENT, check=False)
        if done.code != 0:
            raise lock.unsolved(f"containers/{image.variant}", done.err)
        packages = tomllib.loads(answer.read_text(encoding="utf-8")).get("packages", [])
    # The first file of several is the one that fits this Python best, and the one that pip takes.
    found = [package["wheels"][0] if package.get("wheels") else package["sdist"] for package in packages]
    return round(sum(int(file.get("size", 0)) for file in found) / 1e6)
