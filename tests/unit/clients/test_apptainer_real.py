"""Every verb of the client over spython's with a real Apptainer, in a container, by a command of its name."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import oci
from dray.clients import apptainer, builder, docker
from dray.contract.findings import UnfitError
from helpers import ROOT

pytestmark = pytest.mark.docker
pull = partial(apptainer.pull, what="the image", instead="", say=print)
# A root file system with dash, of the container's own files.
DASH = "cp -L --parents $(ldd /usr/bin/dash | grep -o '/[^ ]*') /usr/bin/dash . && ln -s dash usr/bin/sh"
DASH += " && ln -s usr/bin bin && mkdir proc sys dev tmp etc && tar -cf ../layer.tar ."


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with the command, and an OCI image."""
    folder = tmp_path_factory.mktemp("real")
    with closing(docker.client()) as client:
        image = builder.image(client, ROOT, on_line=lambda _: None)
    options = [f"--security-opt={one}=unconfined" for one in ("seccomp", "apparmor", "systempaths")]
    options += ["--device=/dev/fuse"] if Path("/dev/fuse").exists() else []
    argv = ["docker", "run", "--detach", "--network=host", *options, f"--volume={folder}:{folder}"]
    made = subprocess.run([*argv, image, "sleep", "600"], capture_output=True, text=True, check=True)
    container = made.stdout.strip()
    try:
        script = f"mkdir {folder}/root && cd {folder}/root && {DASH}"
        subprocess.run(["docker", "exec", container, "sh", "-c", script], check=True)
        oci.layout(folder / "layout", (folder / "layer.tar").read_bytes())
        command = folder / "bin" / "apptainer"
        command.parent.mkdir()
        inside = f"exec --env=APPTAINER_NOHTTPS=1 {container} apptainer"
        command.write_text(f'#!/bin/sh\nexec "{shutil.which("docker")}" {inside} "$@"\n')
        command.chmod(0o755)
        yield folder
    finally:
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=True)


@pytest.fixture
def folder(machine, monkeypatch):
    monkeypatch.setenv("PATH", f"{machine}/bin:/usr/bin:/bin")
    return machine


@pytest.fixture
def fetched(folder) -> Path:
    out = folder / "fetched.sif"
    if not out.exists():
        pull(f"oci:{folder}/layout", out)
    return out


def test_an_oci_folder_becomes_a_sif_that_starts(fetched):
    done = apptainer.execute(fetched, ["sh", "-c", "echo $WHOSE; echo error >&2; exit 4"])
    assert (done.code, done.out, done.err.splitlines()[-1]) == (4, "theirs\n", "error")


def test_a_registry(folder):
    with oci.registry(folder / "layout") as where:
        pull(f"docker://{where}/team/image:1", folder / "pulled.sif", what="the image", instead="", say=print)
    assert apptainer.execute(folder / "pulled.sif", ["sh", "-c", "echo $WHOSE"]).out == "theirs\n"


def test_a_registry_that_is_not_there(folder):
    with pytest.raises(UnfitError, match="the image cannot be pulled: the registry cannot be reached") as refused:
        pull("docker://127.0.0.1:1/team/image:1", folder / "none.sif", what="the image", instead="", say=print)
    assert "connection refused" in refused.value.details["found"]
    assert not (folder / "none.sif").exists()


def test_verify_of_what_nobody_signed(fetched):
    done = builder.tool(["apptainer", "verify", "--local", str(fetched)], binds={})
    assert done.code
    assert "signature" in done.err


def test_a_machine_with_docker_alone(fetched, monkeypatch, tmp_path):
    """Apptainer then runs in a container, which sees the image and what it is given, and has no network."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "data").write_text("data\n")
    mount = f"--mount=type=bind,src={tmp_path / 'data'},dst=/mnt,ro"
    options = [mount, "--no-mount=tmp"]
    script = "echo $WHOSE; while read line; do echo $line; done </mnt; ls -d /tmp/*; exit 3"
    done = apptainer.execute(fetched, ["sh", "-c", script], options=options, binds={tmp_path / "data": False})
    assert (done.code, done.out) == (3, "theirs\ndata\n"), done.err
