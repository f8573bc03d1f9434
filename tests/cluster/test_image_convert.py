"""A Dockerfile and its definition, a definition and its Dockerfile: built for real, both hold and print the same."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

import oci
from dray.clients import builder, docker
from dray.images import convert
from helpers import ROOT

pytestmark = pytest.mark.docker
# A root file system of the container's own files.
PROGRAMS = "/usr/bin/cat /usr/bin/dash /usr/bin/env /usr/bin/find /usr/bin/mkdir /usr/bin/sort /usr/bin/stat"
BASE = f"""
set -e
mkdir {{0}}/root && cd {{0}}/root
cp -L --parents $(ldd {PROGRAMS} | grep -o '/[^ ]*\\.so[^ ]*' | sort -u) {PROGRAMS} .
ln -s dash usr/bin/sh && ln -s usr/bin bin && mkdir proc sys dev tmp etc root
echo root:x:0:0:root:/root:/bin/sh >etc/passwd
tar -cf ../layer.tar .
"""
# What is in an image: each file with its mode and content, and what it sets.
LOOK = (
    "cat /two.txt 2>/dev/null; find /opt /made /srv -type f -exec stat --format='%a %n' {} + | sort;"
    "find /opt /made /srv -type f | sort | while read -r file; do echo; echo $file; cat $file; done;"
    "echo ${PATH%%:/usr/local/sbin*};"  # Apptainer adds folders at its end
    'for name in WHOSE GREETING LATER USERS; do eval "echo $name=\\$$name"; done'
)
DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG TAG=1
FROM {where}/base:$TAG
ARG WHO=me
ENV GREETING="hello world" PATH=/opt/bin:$PATH USERS=a
LABEL org.x.title="A title" USER=USER1
RUN mkdir -p /made && cd /tmp && \\
    # a comment
    echo "$GREETING $WHO $USERS" >/made/first
RUN echo "$PWD" >/made/where; false || echo "it's on" >/made/second
WORKDIR /opt/app
COPY app .
COPY one.txt two.txt /srv/some/
RUN echo "$PWD $WHOSE $HOME" >/made/third
COPY app /srv/app/
RUN ["sh", "-c", "echo a  b >'/made/a-b'"]
ENV LATER=$WHO:$GREETING
ENTRYPOINT ["sh", "-c", "echo $PWD; echo \\"$@\\"; echo $LATER", "x y"]
CMD ["one  two", "it's"]
"""
DEFINITION = """\
Bootstrap: docker
From: {where}/base:1

%files
    app /opt/app
    one.txt /srv/
    two.txt

%environment
    export GREETING="hello world"
    export PATH=/opt/bin:$PATH LATER="and $GREETING"
    export USERS=a

%labels
    org.x.title A title
    USER USER1

%post
    umask 022
    mkdir -p /made
    cd /made
    MARK=bootstrap:
    if true; then
        echo "$PWD $MARK $WHOSE $HOME $GREETING" >first
    fi
    cat >second <<END
      USER $MARK
END

%runscript
    echo "$PWD: $LATER"
    for word in "$@"; do
        echo "[$word]"
    done
"""


class Machine(NamedTuple):
    """Docker, and Apptainer in a container."""

    folder: Path
    where: str
    apptainer: Callable[..., str]
    docker: Callable[..., str]


def run(*argv: str | Path, code: int = 0) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("convert")
    shutil.chown(folder, 1000, 1000)
    folder.chmod(0o755)
    for above in folder.parents[:2]:
        above.chmod(above.stat().st_mode | 0o011)
    with closing(docker.client()) as client:
        image = builder.image(client, ROOT, on_line=lambda _: None)
    options = [f"--security-opt={one}=unconfined" for one in ("seccomp", "apparmor", "systempaths")]
    options += ["--device=/dev/fuse", "--network=host", "--user=1000:1000", "--env=HOME=/tmp"]
    name = f"dray-convert-{uuid.uuid4().hex[:8]}"
    run("docker", "run", "--detach", f"--name={name}", *options, f"--volume={folder}:{folder}", image, "sleep", "900")
    # The device has the host's mode, which may be root's alone.
    run("docker", "exec", "--user=0", name, "chmod", "666", "/dev/fuse")
    tag = f"dray-convert:{name[-8:]}"

    def inside(*words: str | Path, code: int = 0) -> str:
        return run(
            "docker", "exec", "--env=APPTAINER_NOHTTPS=1", f"--workdir={folder}", name, "apptainer", *words, code=code
        )

    def with_docker(*words: str | Path, code: int = 0) -> str:
        return run("docker", *(tag if word == "TAG" else word for word in words), code=code)

    try:
        run("docker", "exec", name, "sh", "-c", BASE.format(folder))
        oci.layout(folder / "layout", (folder / "layer.tar").read_bytes())
        (folder / "app" / "below").mkdir(parents=True)
        (folder / "app" / "below" / "script").write_text("#!/bin/sh\n")
        (folder / "app" / "below" / "script").chmod(0o755)
        (folder / "one.txt").write_text("one\n")
        (folder / "two.txt").write_text("two\n")
        with oci.registry(folder / "layout") as where:
            yield Machine(folder, where, inside, with_docker)
            subprocess.run(["docker", "rmi", "--force", tag, f"{where}/base:1"], capture_output=True, check=False)
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=True)


def both(machine: Machine, dockerfile: str, definition: str) -> tuple[list[str], list[str]]:
    """What each image holds, and prints without words and with some."""
    (machine.folder / "Dockerfile").write_text(dockerfile)
    (machine.folder / "X.def").write_text(definition)
    machine.docker("build", "--tag", "TAG", "--file", machine.folder / "Dockerfile", machine.folder)
    machine.apptainer("build", "--force", "X.sif", "X.def")
    by_docker = [
        machine.docker("run", "--rm", "--entrypoint", "sh", "TAG", "-c", LOOK),
        machine.docker("run", "--rm", "TAG"),
        machine.docker("run", "--rm", "TAG", "a  b", "$c"),
    ]
    plain = ("--cleanenv", "--no-mount=home,cwd")
    by_apptainer = [
        machine.apptainer("exec", *plain, "X.sif", "sh", "-c", LOOK),
        machine.apptainer("run", *plain, "--pwd=/", "X.sif"),
        machine.apptainer("run", *plain, "--pwd=/", "X.sif", "a  b", "$c"),
    ]
    return by_docker, by_apptainer


def test_a_dockerfile_becomes_a_definition(machine: Machine) -> None:
    given = DOCKERFILE.format(where=machine.where)
    (machine.folder / "Dockerfile").write_text(given)
    made = convert.convert(machine.folder / "Dockerfile")
    by_docker, by_apptainer = both(machine, given, made.text)
    assert by_apptainer == by_docker
    assert "hello world me a\n" in by_docker[0]
    assert by_docker[1] == "/opt/app\none  two it's\nme:hello world\n"
    assert by_docker[2] == "/opt/app\na  b $c\nme:hello world\n"
    labels = machine.apptainer("inspect", "--labels", "X.sif")
    assert "org.x.title: A title\n" in labels
    assert "USER: USER1\n" in labels


@pytest.mark.slow
def test_a_definition_becomes_a_dockerfile(machine: Machine) -> None:
    given = DEFINITION.format(where=machine.where)
    (machine.folder / "X.def").write_text(given)
    made = convert.convert(machine.folder / "X.def")
    by_docker, by_apptainer = both(machine, made.text, given)
    assert by_docker == by_apptainer
    assert "/made bootstrap: theirs /root \n" in by_docker[0]
    assert by_docker[2] == "/: and hello world\n[a  b]\n[$c]\n"
    template = "{{json .Config.Labels}}"
    assert machine.docker("inspect", f"--format={template}", "TAG") == '{"USER":"USER1","org.x.title":"A title"}\n'


def test_a_command_that_fails_stops_both(machine: Machine) -> None:
    """spython's own lines would go on: in %post a && b ends nothing where a fails."""
    for name, text in (
        ("Dockerfile", f"FROM {machine.where}/base:1\nRUN false && true\n"),
        ("X.def", f"Bootstrap: docker\nFrom: {machine.where}/base:1\n%post\n    cd /none\n    true\n"),
    ):
        (machine.folder / name).write_text(text)
        made = convert.convert(machine.folder / name)
        assert made.notes == ()
        (machine.folder / "made").write_text(made.text)
        if name == "Dockerfile":
            machine.apptainer("build", "--force", "fails.sif", "made", code=255)
        else:
            machine.docker("build", "--file", machine.folder / "made", machine.folder, code=2 if "cd" in text else 1)
