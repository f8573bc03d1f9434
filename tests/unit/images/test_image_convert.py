"""`dray image convert`: whole outputs, packages for a layer, and the command with its files."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dray.clients import singularity
from dray.contract.findings import ConfigError, DrayError
from dray.images import convert
from dray.images.convert import definition, write
from helpers import PYTHON, ROOT

DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG TAG=bookworm
FROM debian:$TAG AS only
ARG WHO=me
ENV GREETING="hello world" PATH=/opt/bin:$PATH
ENV OLD a b
LABEL org.x.title="A title" user=USER1
RUN apt-get update && \\
    # a comment
    apt-get install -y git
WORKDIR /app
COPY app .
ADD req.txt /opt/
RUN pip install einops==0.8.0
RUN ["echo", "a b"]
ENV WHOM=$WHO
ENTRYPOINT ["python3", "-m", "x y"]
CMD ["--help"]
"""
DEFINITION = """\
# dray image convert Dockerfile
Bootstrap: docker
From: debian:bookworm

%files
app/. /app
req.txt /opt/req.txt

%labels
org.x.title A title
user USER1

%post
umask 022
export WHO=me
export GREETING="hello world"
export PATH=/opt/bin:$PATH
export OLD="a b"
/bin/sh -c 'apt-get update &&     apt-get install -y git'
mkdir -p /app
cd /app
pip install einops==0.8.0
echo 'a b'
export WHOM=me

%environment
export GREETING="hello world"
export PATH=/opt/bin:$PATH
export OLD="a b"
export WHOM=me

%runscript
cd /app
exec /bin/sh -c '[ $# -gt 0 ] || set -- --help; exec python3 -m '"'"'x y'"'"' "$@"' sh "$@"
"""
THEIRS = """\
Bootstrap: docker
From: Example.org:5000/Team/Image:Tag1   # a comment
Stage: build

%files
    app /opt/app
    req.txt

%environment
    # a comment
    export A="x y" PATH=/opt/bin:$PATH
    export B=$A

%labels
    user USER 1

%post
    cd /tmp
    if true; then
        echo "bootstrap: $PWD"   # kept
    fi

%runscript
    exec python3 -m app "$@"
"""
BACK = """\
# dray image convert X.def
FROM Example.org:5000/Team/Image:Tag1
COPY app/. /opt/app
COPY req.txt /req.txt
RUN ["/bin/sh", "-ec", "    cd /tmp\\n    if true; then\\n        echo \\"bootstrap: $PWD\\"   # kept\\n    fi"]
LABEL user="USER 1"
ENV A="x y"
ENV PATH=/opt/bin:$PATH
ENV B=$A
ENTRYPOINT ["python3", "-m", "app"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print(1)\n")
    (tmp_path / "req.txt").write_text("# ours\ntrl>=0.9  # newest\n\nwandb\n")
    return tmp_path


def converted(folder: Path, text: str, name: str = "Dockerfile") -> convert.Converted:
    (folder / name).write_text(text)
    return convert.convert(folder / name)


def test_a_whole_dockerfile(folder: Path) -> None:
    made = converted(folder, DOCKERFILE)
    assert made.text == DEFINITION
    assert made.notes == ("WORKDIR /app holds for apptainer run; apptainer exec starts where you stand",)


def test_a_whole_definition(folder: Path) -> None:
    made = converted(folder, THEIRS, "X.def")
    assert made.text == BACK
    assert made.notes == ("%files app /opt/app: taken as /opt/app not being in the base image",)


def test_there_and_back(folder: Path) -> None:
    """What dray has written it can read, both ways."""
    back = converted(folder, DEFINITION, "X.def").text
    again = converted(folder, back).text
    first, second = (definition.read(text, folder, folder)[0] for text in (DEFINITION, again))
    assert (second.base, second.files, second.labels, second.env) == (first.base, first.files, first.labels, first.env)
    assert second.post[0] == "umask 022"
    assert shlex.split("\n".join(second.post[1:]))[:3] == ["/bin/sh", "-ec", "\n".join(first.post)]


@pytest.mark.parametrize(
    ("lines", "runscript"),
    [
        ('ENTRYPOINT ["a"]', 'exec a "$@"'),
        ("ENTRYPOINT a $HOME", """exec /bin/sh -c 'a $HOME' "$@\""""),
        ('CMD ["a", "b"]', """exec /bin/sh -c '[ $# -gt 0 ] || set -- a b; exec "$@"' sh "$@\""""),
        ("CMD a && b", """exec /bin/sh -c '[ $# -gt 0 ] || set -- /bin/sh -c '"'"'a && b'"'"'; exec "$@"' sh "$@\""""),
        ("RUN true", None),
    ],
)
def test_what_starts(folder: Path, lines: str, runscript: str | None) -> None:
    """Words that a user adds take the place of CMD's; without any, the base's own start is kept."""
    made = converted(folder, f"FROM a\n{lines}\n").text
    assert made.partition("%runscript\n")[2].rstrip("\n") == (runscript or "")
    assert ("%runscript" in made, "%startscript" in made) == (runscript is not None, False)


@pytest.mark.parametrize(
    ("run", "line"),
    [
        ("pip install a", "pip install a"),
        ("cd /tmp", "/bin/sh -c 'cd /tmp'"),
        ("A=1 b", "/bin/sh -c 'A=1 b'"),
        ("a || true", "/bin/sh -c 'a || true'"),
        ("echo $HOME", "/bin/sh -c 'echo $HOME'"),
        ("USERADD x", "/bin/sh -c 'USERADD x'"),
        ('["a", "b\\nc"]', "a 'b\nc'"),
        ("echo bootstrap: USER", "echo bootstrap: USER"),
        ("%post", "/bin/sh -c %post"),
        ("Bootstrap: x", "/bin/sh -c 'Bootstrap: x'"),
        ("echo '%post'", """/bin/sh -c 'echo '"'"'%post'"'"''"""),
    ],
)
def test_each_run_has_a_shell_of_its_own(folder: Path, run: str, line: str) -> None:
    assert converted(folder, f"FROM a\nRUN {run}\n").text.partition("%post\n")[2] == f"umask 022\n{line}\n"


@pytest.mark.parametrize("name", ["a\nRUN id", "{{ a }}", "a b", "é"])
def test_a_name_that_a_comment_would_end_at(folder: Path, name: str) -> None:
    assert converted(folder, "FROM a\n", name).text == "# dray image convert FILE\nBootstrap: docker\nFrom: a\n"


def test_what_spython_writes_is_read_again(folder: Path, monkeypatch) -> None:
    """A trap that nobody knew ends the conversion, and no file comes of it."""
    real = singularity.written
    monkeypatch.setattr(write.singularity, "written", lambda *a, **k: real(*a, **k).replace("einops", "einop"))
    with pytest.raises(DrayError, match="spython's writer wrote something else") as refused:
        converted(folder, DOCKERFILE)
    assert (refused.value.details["where"], refused.value.exit_code) == ("post", 1)


class TestPackages:
    def packages(self, folder: Path, text: str) -> convert.Converted:
        (folder / "Dockerfile").write_text(text)
        return convert.packages(folder / "Dockerfile", "cuda", ROOT)

    def test_those_of_pip(self, folder: Path) -> None:
        made = self.packages(
            folder,
            "FROM nvcr.io/nvidia/pytorch:25.01-py3\n"
            "RUN apt-get update && apt-get install -y --no-install-recommends gcc && rm -rf /var/lib/apt/lists/*\n"
            "WORKDIR /w\nCOPY req.txt .\nRUN pip install --no-cache-dir -r req.txt 'peft>=0.9' && pip3 install -U pip\n"
            "RUN python3 -m pip install einops[x]==0.8\n",
        )
        assert (
            made.text == "# dray image convert Dockerfile --variant cuda\ntrl>=0.9\nwandb\npeft>=0.9\neinops[x]==0.8\n"
        )
        (note,) = made.notes
        assert note.startswith("the base nvcr.io/nvidia/pytorch:25.01-py3 is not carried")

    def test_those_of_a_definition(self, folder: Path) -> None:
        (folder / "X.def").write_text("Bootstrap: docker\nFrom: a\n%post\n    apt-get update\n    pip install trl\n")
        made = convert.packages(folder / "X.def", "cuda", ROOT)
        assert made.text == "# dray image convert X.def --variant cuda\ntrl\n"

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("RUN apt-get install -y git", "apt-get install -y git: the image has no Debian package git"),
            ("RUN apt-get remove gcc", "apt-get remove gcc: remove of apt-get"),
            ("RUN pip install git+https://example.org/x", "pip install git+https://example.org/x: git+https"),
            ("RUN pip install -e .", "pip install -e .: -e is no package by its name"),
            ("RUN pip install --index-url x a", "pip install --index-url x a: --index-url is no package"),
            ("RUN pip install -r none.txt", "pip install -r none.txt: no line before it copies none.txt alone"),
            ("RUN pip install a || true", "pip install a || true: more than a plain pip install"),
            ("RUN pip install a; b", "pip install a; b: more than a plain pip install"),
            ("RUN conda install a", "conda install a: more than a plain pip install"),
            ("RUN pip install $A", "pip install $A: more than a plain pip install"),
            ("ENV A=1", "ENV A=1: a layer has packages alone"),
            ("COPY app /app", "COPY app /app: a layer has packages alone"),
            ('CMD ["a"]', 'CMD ["a"]: a layer has packages alone'),
            ("RUN --mount=type=cache,target=/c pip install a", "RUN --mount=type=cache,target=/c pip install a: the"),
        ],
    )  # fmt: skip
    def test_a_line_that_a_layer_cannot_have(self, folder: Path, line: str, why: str) -> None:
        with pytest.raises(ConfigError, match="1 line cannot be carried into packages for the image cuda") as refused:
            self.packages(folder, f"FROM a\n{line}\n")
        assert refused.value.details["found"].startswith(f"line 2: {why}"), refused.value

    def test_none(self, folder: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            self.packages(folder, "FROM a\n")
        assert refused.value.details["found"] == "line 1: : it installs no package with pip"


class TestTheCommand:
    def run(self, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "dray", "image", "convert", *words]
        base = {**PYTHON, "HOME": "/nonexistent", "DRAY_HOME": str(ROOT), "PATH": "/usr/bin:/bin"}
        return subprocess.run(argv, env={**base, **env}, cwd=folder, capture_output=True, text=True, check=False)

    @pytest.mark.seconds
    def test_to_standard_output_and_to_a_file(self, folder: Path) -> None:
        (folder / "Dockerfile").write_text(DOCKERFILE)
        plain = self.run(folder, "Dockerfile")
        assert (plain.returncode, plain.stdout) == (0, DEFINITION), plain.stderr
        assert plain.stderr.startswith("dray: note: WORKDIR /app holds for apptainer run")
        ended = self.run(folder, "Dockerfile", "--out", "X.def")
        assert (ended.returncode, ended.stdout) == (0, "X.def\napptainer build X.sif X.def\n")
        assert (folder / "X.def").read_text() == DEFINITION
        again = self.run(folder, "Dockerfile", "--out", "X.def")
        assert (again.returncode, again.stdout) == (78, "")
        assert again.stderr.endswith("dray: the file exists already\n  where:  X.def\n  fix:    --force replaces it\n")
        assert self.run(folder, "X.def", "--out", "X.def", "--force").returncode == 78
        (folder / "X.def").write_text("old")
        assert self.run(folder, "Dockerfile", "--out", "X.def", "--force").returncode == 0
        assert (folder / "X.def").read_text() == DEFINITION
        back = self.run(folder, "X.def", "--out", "back", "--context", str(folder))
        assert back.stdout == f"back\ndocker build --file back {folder}\n"

    @pytest.mark.seconds
    def test_a_link_that_somebody_has_laid(self, folder: Path) -> None:
        (folder / "Dockerfile").write_text("FROM a\n")
        (folder / "out").symlink_to("elsewhere")
        assert self.run(folder, "Dockerfile", "--out", "out").returncode == 78
        assert not (folder / "elsewhere").exists()
        assert self.run(folder, "Dockerfile", "--out", "out", "--force").returncode == 0
        assert not (folder / "elsewhere").exists()
        assert not (folder / "out").is_symlink()

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (["none"], "the file to convert cannot be read"),
            (["."], "the file to convert cannot be read"),
            (["fifo"], "the file to convert cannot be read"),
            (["binary"], "the file to convert is not UTF-8 text"),
            (["control"], "the file to convert has a control character"),
            (["Dockerfile", "--context", "none"], "the context is no folder"),
            (["Dockerfile", "--out", "none/x"], "the file cannot be written"),
            (["Dockerfile", "--variant", "h100"], "no such image"),
            (["Dockerfile", "--variant", "cuda", "--buildkit"], "--variant and --buildkit exclude each other"),
            (["X.def", "--buildkit"], "buildkit builds Dockerfiles"),
            (["Dockerfile", "--buildkit"], "Bootstrap: buildkit needs a newer Apptainer"),
        ],
    )
    def test_a_command_that_is_wrong(self, folder: Path, words: list[str], problem: str) -> None:
        (folder / "Dockerfile").write_text("FROM a\n")
        (folder / "X.def").write_text("Bootstrap: docker\nFrom: a\n")
        (folder / "binary").write_bytes(b"FROM \xff\n")
        (folder / "control").write_bytes(b"FROM a\nRUN \x1b[2J\n")
        os.mkfifo(folder / "fifo")
        (folder / "apptainer").write_text("#!/bin/sh\necho apptainer version 1.4.5-2\n")
        (folder / "apptainer").chmod(0o755)
        ended = self.run(folder, *words, PATH=f"{folder}:/usr/bin:/bin")
        assert (ended.returncode, ended.stdout) == (78, ""), ended.stderr
        assert ended.stderr.startswith(f"dray: {problem}\n"), ended.stderr

    @pytest.mark.seconds
    def test_buildkit_where_apptainer_has_it(self, folder: Path) -> None:
        (folder / "Dockerfile").write_text("FROM a\nUSER me\n")
        (folder / "apptainer").write_text("#!/bin/sh\necho apptainer version 1.5.2\n")
        (folder / "apptainer").chmod(0o755)
        ended = self.run(folder, "Dockerfile", "--buildkit", PATH=f"{folder}:/usr/bin:/bin")
        assert (ended.returncode, ended.stdout) == (0, f"Bootstrap: buildkit\nFrom: {folder}\n"), ended.stderr

    @pytest.mark.seconds
    def test_packages(self, folder: Path) -> None:
        (folder / "Dockerfile").write_text("FROM a\nRUN pip install trl\n")
        out = shlex.quote("r.txt")
        ended = self.run(folder, "Dockerfile", "--variant", "cuda", "--out", "r.txt")
        assert ended.stdout == f"r.txt\ndray image layer cuda --requirements {out} --name NAME\n", ended.stderr
