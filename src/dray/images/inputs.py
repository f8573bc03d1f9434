"""All that a build reads, in one folder: the context of a Docker build, and /mnt of an Apptainer build."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

from dray.errors import ConfigError
from dray.images import wheels
from dray.spec.image import Image
from dray.spec.model import load

_PROXIES = ("http_proxy", "https_proxy", "no_proxy")


def image(checkout: Path, variant: str) -> Image:
    """The description of a variant."""
    variants = sorted(path.parent.name for path in (checkout / "containers").glob("*/image.toml"))
    if variant not in variants:
        raise ConfigError(
            "there is no such image", where=checkout / "containers", wanted=", ".join(variants), found=variant
        )
    return load(Image, checkout / "containers" / variant / "image.toml")


def gather(checkout: Path, image: Image, *, say: Callable[[str], None]) -> Path:
    """Fetch what is not there yet, and make the folder anew from the checkout and the host."""
    wheel_folder = checkout / "build" / "wheels"
    say("dray: wheels")
    new = wheels.fetch(lock=_lock(checkout, image), python=image.python, folder=wheel_folder / image.variant)
    say(f"dray: wheels {'fetched' if new else 'are all there'}")
    own = wheels.own(checkout=checkout, folder=wheel_folder / "dray")
    return lay_out(checkout, image, fetched=wheel_folder / image.variant, own=own)


def lay_out(checkout: Path, image: Image, *, fetched: Path, own: Path) -> Path:
    """build/inputs/<variant>, as the steps, the definition and the Containerfile expect it."""
    source = checkout / "containers" / image.variant
    folder = checkout / "build" / "inputs" / image.variant
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout / "containers" / "steps", folder / "steps")
    shutil.copytree(fetched, folder / "wheels", copy_function=_link)
    (folder / "dray").mkdir()
    shutil.copy2(own, folder / "dray")
    shutil.copy2(_lock(checkout, image), folder)
    shutil.copy2(source / f"dray-{image.variant}.def", folder / "dray.def")
    containerfile = (source / "Containerfile").read_text()
    (folder / "Containerfile").write_text(containerfile + _docker_labels(image.labels))
    (folder / "labels").write_text("".join(f"{key} {value}\n" for key, value in image.labels.items()))
    (folder / "image.env").write_text(_assign({"DRAY_VARIANT": image.variant, "DRAY_PYTHON": image.python}))
    _host(folder / "host", os.environ)
    return folder


def _lock(checkout: Path, image: Image) -> Path:
    return checkout / "containers" / image.variant / "requirements.lock"


def proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The host's proxies under the lower-case names, the only ones that apt reads."""
    found = {name: environment.get(name) or environment.get(name.upper()) for name in _PROXIES}
    return {name: value for name, value in found.items() if value}


def _host(folder: Path, environment: Mapping[str, str]) -> None:
    folder.mkdir()
    (folder / "env").touch(mode=0o600)  # a proxy's address may hold a password
    (folder / "env").write_text(_assign(proxies(environment)))
    bundle = ssl.get_default_verify_paths().cafile
    if bundle:
        shutil.copyfile(bundle, folder / "ca.crt")


def _assign(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _docker_labels(labels: Mapping[str, str]) -> str:
    return "".join(f"LABEL {key}={json.dumps(value).replace('$', chr(92) + '$')}\n" for key, value in labels.items())


def _link(source: str, target: str) -> str:
    """Hundreds of megabytes that are already on this disk need no second copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
