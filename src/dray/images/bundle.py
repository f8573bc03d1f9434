"""A bundle: one folder with all that a build reads, for a machine that reaches nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import dockerd, process
from dray.errors import ConfigError
from dray.images import builder, inputs
from dray.images.inputs import Source
from dray.images.rootfs import apptainer, local_base, start_from

SUMS = "SHA256SUMS"
BUILDER = "builder.tar"
_README = """# The {variant} image of dray, to be built without a network

Made by `dray image bundle {variant}`. On a machine that reaches nothing, in a checkout of the same dray:

    make image-{variant} BUNDLE={out}

With Apptainer alone, in this folder:

    mkdir base && tar --extract --file base.tar --directory base --exclude='./dev/*'
    apptainer build --bind "$PWD:/mnt" --build-arg BOOTSTRAP=localimage --build-arg BASE=base \\
      ../dray-{variant}.sif dray.def

With Docker alone, in this folder:

    docker import base.tar dray-base:bundle
    docker build --network none --build-arg BASE=dray-base:bundle --tag dray:{variant} .

`sha256sum --check SHA256SUMS` tells whether all of it has arrived.
"""


def make(checkout: Path, source: Source, out: Path, *, say: Callable[[str], None]) -> Path:
    """Lay out `out` from the inputs of a build. It is there whole, or not at all."""
    if out.exists():
        raise ConfigError("the bundle's folder is there already", where=out, fix="name another, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as made:
        folder = Path(made) / out.name
        shutil.copytree(source.inputs, folder, copy_function=inputs.link)
        _base(source.base, folder)
        _tools(checkout, folder, say)
        variant = source.image.variant
        (folder / "README.md").write_text(_README.format(variant=variant, out=out))
        (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in inputs.sums(folder).items()))
        folder.replace(out)
    return out


def opened(checkout: Path, folder: Path, variant: str) -> Source:
    """What a bundle holds, if it is one, is of this variant, and has arrived whole."""
    folder = folder.expanduser().resolve()
    if not (folder / SUMS).is_file():
        raise ConfigError(
            "this is no bundle",
            where=folder,
            wanted=f"a folder with {SUMS}",
            fix=f"dray image bundle {variant} makes one",
        )
    found = inputs.facts(folder)["DRAY_VARIANT"]
    if found != variant:
        raise ConfigError("the bundle is of another image", where=folder, wanted=variant, found=found)
    wanted = {line[66:]: line[:64] for line in (folder / SUMS).read_text().splitlines()}
    there = inputs.sums(folder)
    del there[SUMS]
    wrong = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if wrong:
        raise ConfigError(
            "the bundle has not arrived whole",
            where=folder,
            found="\n".join(
                f"{name}: {'missing' if name not in there else 'other bytes' if name in wanted else 'not its own'}"
                for name in wrong
            ),
            fix="copy it again",
        )
    base = next(folder.glob("base.*"))
    return Source(image=inputs.image(checkout, variant), inputs=folder, base=str(base))


def _base(base: str, folder: Path) -> None:
    path = local_base(base)
    if path is not None and path.is_file():
        inputs.link(path, folder / f"base{path.suffix}")
        return
    if path is not None:
        process.run(["tar", "--create", "--file", folder / "base.tar", "--directory", path, "."])
        return
    with builder.engine() as client:
        if client is None:
            scheme, reference = start_from(base, folder)
            process.run([apptainer() or "apptainer", "pull", folder / "base.sif", f"{scheme}://{reference}"], show=True)
            return
        with dockerd.doing(f"write {base} to a file"), (folder / "base.tar").open("wb") as out:
            container = client.containers.create(dockerd.base_image(client, base.removeprefix("docker://")))
            try:
                out.writelines(container.export())  # type: ignore[arg-type]  # its stubs say str
            finally:
                container.remove()


def _tools(checkout: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Where Docker lends the Apptainer, the air-gapped machine will want it too."""
    with builder.engine() as client:
        if client is not None:
            image = builder.image(client, checkout, say)
            with dockerd.doing("write the builder to a file"), (folder / BUILDER).open("wb") as out:
                out.writelines(client.images.get(image).save(named=builder.TAG))
