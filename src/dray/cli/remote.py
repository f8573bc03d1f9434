"""`dray remote`: clusters that are reached from here by ssh."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli import candidates
from dray.config import dray_home
from dray.images import store
from dray.remote import remotes_file, ssh, transfer

app = typer.Typer()


@app.command()
def add(
    name: str,
    place: Annotated[
        str, typer.Argument(metavar="USER@HOST:/FOLDER", help="Login node as ssh takes it, and a folder there.")
    ],
) -> None:
    """Name a login node, and a folder of yours there that all nodes share. dray does not connect yet.

    NAME: Your name for the remote.

    dray remote add lumi me@lumi.csc.fi:/scratch/project_1/me/dray
    """
    added = remotes_file.parse(name, place)
    remotes_file.write(remotes_file.read() | {name: added})
    print(f"{name}: {added.place}\ndray remote check {name} shows whether it can run a job")


@app.command("list")
def show() -> None:
    """Print the remotes, and the file where you can remove one.

    dray remote list
    """
    print(f"# {remotes_file.file()}")
    for one in remotes_file.read().values():
        print(f"{one.name}  {one.place}")
    if not remotes_file.read():
        print("no remotes; to name one: dray remote add NAME USER@HOST:/FOLDER")


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A remote's name.", autocompletion=candidates.remotes)],
    image: str = "",
) -> None:
    """Log in and check what a job needs there: Slurm, Apptainer, space, and the folder, which the first login makes.

    --image VARIANT|FILE: Copy this image and dray's scripts there too.

    dray remote check lumi
    dray remote check lumi --image cpu
    """
    remote = remotes_file.find(name)
    file = store.named(dray_home.root(), image) if image else None
    with ssh.connected(remote) as connection:
        print(connection.ask("check"), end="")
        if file:
            transfer.copy_image(connection, file, print)
    print(f"{name} can run jobs: {remote.place}")
