"""A build by cotainr, without its minutes: what it is given, what it may see, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from dray.config.image import ACCELERATORS
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images import cotainr
from dray.images.rootfs import cotainr as program
from dray.images.rootfs import make
from dray.images.sources import inputs, lock
from helpers import ROOT

DIGEST = f"sha256:{hashlib.sha256(b'installer').hexdigest()}"
# It makes a folder where it is told to, of what it is told, as `apptainer build` does.
APPTAINER = """#!/bin/bash
printf '%s|' "$@" >>"$LOG"
echo >>"$LOG"
if [[ $1 == build ]]; then mkdir -p "${@: -2:1}/etc"; fi
"""
# In cotainr's place: it says what it was given, and does what cotainr does first and last.
COTAINR = """
import json, os, pathlib, subprocess, sys
print("\\x1b[2K\\u28fe Cotainr:-: Working...\\r\\x1b[2KCotainr:-: Working", flush=True)
tmp = pathlib.Path(os.environ["TMPDIR"])
(tmp / "said.json").write_text(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))
(tmp / "conda_installer.sh").write_text("installer")
words = ["-q", "--nocolor", "exec", "--writable", "sandbox", "bash", "conda_installer.sh", "-b"]
done = subprocess.run(["singularity", *words], cwd=tmp)
if done.returncode == 0:
    pathlib.Path(sys.argv[2]).write_text("sif")
sys.exit(done.returncode)
"""


@pytest.fixture
def source(tmp_path) -> inputs.Source:
    """What a build's inputs hold that cotainr needs, in a folder with a space."""
    folder = tmp_path / "my work"
    shutil.copytree(ROOT / "containers" / "steps", folder / "steps", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "labels").write_text("a b\n")
    pins = [lock.Pin("deepspeed", "1", ("d" * 64,)), lock.Pin("torch", "2.8.0+rocm6.4", ("a" * 64, "b" * 64))]
    (folder / "requirements.lock").write_text("# head\n" + "".join(f"{pin}\n" for pin in pins))
    return inputs.Source(image=inputs.image(ROOT, "rocm"), inputs=folder, base=tmp_path / "base.tar")


@pytest.fixture
def laid(source, tmp_path, monkeypatch) -> Path:
    """The inputs, with a cotainr that tells what it sees."""
    package = tmp_path / "site" / "cotainr"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(COTAINR)
    monkeypatch.setattr(cotainr, "package", lambda: package)
    cotainr.lay_out(ROOT, source)
    return source.inputs


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """apptainer, alone on PATH with Debian's programs; the log of what it was asked."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    (folder / "apptainer").write_text(APPTAINER.replace("$LOG", str(log)))
    (folder / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(make, "start_from", lambda base, scratch: "base")
    return log


def build(folder: Path, scratch: Path) -> program.Made:
    scratch.mkdir(exist_ok=True)
    return program.build(inputs=folder, base=Path("base.tar"), scratch=scratch, epoch=7)


def test_the_inputs(laid, source):
    assert (laid / "cotainr" / "environment.yml").read_text() == (
        "name: dray-rocm\n"
        "channels: [conda-forge, nodefaults]\n"
        "dependencies:\n"
        "  - python=3.11\n"
        "  - pip\n"
        "  - pip:\n"
        '      - "--no-index"\n'
        '      - "--find-links /mnt/wheels"\n'
        '      - "--require-hashes"\n'
        f'      - "torch==2.8.0+rocm6.4 --hash=sha256:{"a" * 64} --hash=sha256:{"b" * 64}"\n'
    )
    assert (laid / "labels").read_text() == (
        "a b\ncotainr.version 2025.7.1\ncotainr.url https://github.com/DeiC-HPC/cotainr\n"
    )
    assert (laid / "cotainr" / "miniforge").read_text() == ""
    theirs = ROOT / "containers" / "cotainr"
    assert (laid / "steps" / "50-python.sh").read_text() == (theirs / "50-python.sh").read_text()
    found = {str(path.relative_to(laid / "cotainr")) for path in (laid / "cotainr").rglob("*") if path.is_file()}
    assert found == {"base.def", "bin/singularity", "environment.yml", "miniforge"} | {
        f"tool/cotainr/__{name}__.py" for name in ("init", "main")
    }
    assert (laid / "cotainr" / "bin" / "singularity").stat().st_mode & stat.S_IXUSR


def test_another_image_of_the_same_lock(laid, source):
    """It is not taken for the one that is built without cotainr, nor for one of another Miniforge."""
    digests = {source.digest}
    for change in (
        lambda: (laid / "cotainr" / "miniforge").write_text(DIGEST),
        lambda: shutil.rmtree(laid / "cotainr"),
    ):
        change()
        digests.add(inputs.Source(image=source.image, inputs=laid, base=source.base).digest)
    assert len(digests) == 3


@pytest.mark.parametrize("variant", ACCELERATORS)
def test_every_variant_s_packages_by_their_hashes(variant):
    pins = lock.read(ROOT / "containers" / variant / "requirements.lock")
    image = inputs.image(ROOT, variant)
    read = yaml.safe_load(cotainr.environment(image, pins))
    *conda, pip = read.pop("dependencies")
    assert (read, conda) == (
        {"name": f"dray-{variant}", "channels": ["conda-forge", "nodefaults"]},
        [f"python={image.python}", "pip"],
    )
    options, packages = pip["pip"][:3], pip["pip"][3:]
    assert options == ["--no-index", "--find-links /mnt/wheels", "--require-hashes"]
    assert [one.split()[0] for one in packages] == [
        f"{pin.name}=={pin.version}" for pin in pins if pin.name != "deepspeed"
    ]
    assert all(" --hash=sha256:" in one for one in packages)


def test_cotainr_s_command_and_all_that_it_sees(laid, tools, tmp_path, monkeypatch, capsys):
    ca = tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    monkeypatch.setenv("https_proxy", "http://me:word@proxy.invalid")
    for name in ("PYTHONPATH", "PIP_INDEX_URL", "CONDA_EXE", "WANDB_API_KEY", "APPTAINER_BIND"):
        monkeypatch.setenv(name, "theirs")
    scratch = tmp_path / "scratch"
    made = build(laid, scratch)
    work, tmp = scratch / "cotainr", scratch / "cotainr" / "tmp"
    words, cwd, environment = json.loads((tmp / "said.json").read_text())
    assert words == [
        *("build", f"{work}/cotainr.sif", f"--base-image={work}/rootfs"),
        *(f"--conda-env={laid}/cotainr/environment.yml", "--accept-licenses", "--no-color", "-v"),
    ]
    assert cwd == f"{laid}/cotainr/tool"
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    expected = {
        "PATH": f"{laid}/cotainr/bin:{os.environ['PATH']}",
        "HOME": str(tmp),
        "TMPDIR": str(tmp),
        "SSL_CERT_FILE": str(ca),
        "https_proxy": "http://me:word@proxy.invalid",
        "PYTHONDONTWRITEBYTECODE": "1",
        "APPTAINER_BIND": f"{laid}:/mnt:ro,{tmp}:{tmp},{tmp}:/tmp,{ca}:{bundle}:ro",
        "APPTAINER_CONTAIN": "1",
        "APPTAINER_CWD": "/",
        "APPTAINER_DISABLE_CACHE": "1",
        "APPTAINER_MKSQUASHFS_ARGS": "-comp zstd -Xcompression-level 1",
        "APPTAINER_TMPDIR": str(tmp),
        "APPTAINERENV_SSL_CERT_FILE": bundle,
        "APPTAINERENV_REQUESTS_CA_BUNDLE": bundle,
        "APPTAINERENV_PIP_CONFIG_FILE": "/dev/null",
        "APPTAINERENV_PIP_NO_CACHE_DIR": "1",
        "APPTAINERENV_CONDA_REGISTER_ENVS": "false",
    }
    assert {name: value for name, value in environment.items() if name not in {"LANG", "LC_CTYPE"}} == expected
    first, then = tools.read_text().splitlines()
    definition = laid / "cotainr" / "base.def"
    argv = make.build_argv(
        tool="apptainer", definition=definition, binds={laid: "/mnt"}, base="base", rootfs=work / "rootfs"
    )
    assert first == "".join(f"{word}|" for word in argv[1:])
    assert then == "-q|--nocolor|exec|--writable|sandbox|bash|conda_installer.sh|-b|"
    assert (made.sif, made.miniforge) == (work / "cotainr.sif", DIGEST)
    # What was made to mount the folder goes again, and nothing that the base has.
    assert [str(path) for path in made.mounts] == [
        str(path).lstrip("/") for path in (tmp, *tmp.parents) if path != Path("/")
    ]
    assert "me:word" not in capsys.readouterr().out


def test_the_spinner_is_not_in_the_log(laid, tools, tmp_path, capfd):
    build(laid, tmp_path / "scratch")
    assert capfd.readouterr().out.splitlines()[-1] == "Cotainr:-: Working"


def test_another_miniforge_is_not_run(laid, tools, tmp_path):
    (laid / "cotainr" / "miniforge").write_text(f"sha256:{'0' * 64}")
    with pytest.raises(ConfigError) as raised:
        build(laid, tmp_path / "scratch")
    assert raised.value.details == {
        "wanted": f"sha256:{'0' * 64}",
        "found": DIGEST,
        "fix": "look what has changed in it, then give the new digest to --miniforge",
    }
    assert len(tools.read_text().splitlines()) == 1, "the installer was run"


def test_the_miniforge_that_is_wanted(laid, tools, tmp_path):
    (laid / "cotainr" / "miniforge").write_text(DIGEST)
    assert build(laid, tmp_path / "scratch").miniforge == DIGEST


@pytest.mark.parametrize("last", ["raise SystemExit(3)", "pathlib.Path(sys.argv[2]).unlink()"])
def test_a_cotainr_that_fails(last, laid, tools, tmp_path):
    (laid / "cotainr" / "tool" / "cotainr" / "__main__.py").write_text(f"{COTAINR.rpartition('sys.exit')[0]}{last}\n")
    with pytest.raises(DrayError, match=f"cotainr failed with exit code {3 if 'Exit' in last else 0}"):
        build(laid, tmp_path / "scratch")


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_folder_that_cannot_be_bound(name, laid, tmp_path):
    with pytest.raises(ConfigError, match="cannot bind a path with , or :"):
        dict(program.environment(laid, tmp_path / name))


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        ([], "cotainr downloads Miniforge, whose licence you have to accept", "--accept-licenses"),
        (["--format", "docker"], "cotainr makes a SIF", "leave out --format"),
        (["--format", "sif", "--format", "podman"], "cotainr makes a SIF", "leave out --format"),
        (["--bundle", "b"], "cotainr needs a network, and a bundle is for machines without one", ""),
        (["--twice"], "two builds by cotainr differ", "leave out --twice; or"),
        (["--miniforge", "sha256:0"], "not a digest", ""),
        (["--miniforge", "0" * 64], "not a digest", ""),
        (["--miniforge", f"sha256:{'0' * 64}\n"], "not a digest", ""),
        (["--miniforge", f"sha256:{'A' * 64}"], "not a digest", ""),
        (["--with", "conda"], "--with has a wrong value", ""),
        (["--with", ""], "--with has a wrong value", ""),
    ],
)
def test_options_that_do_not_go_together(words, problem, fix):
    argv = [sys.executable, "-m", "dray", "image", "build", "rocm", "--with", "cotainr", *words]
    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert refused.returncode == 78
    assert problem in refused.stderr
    assert fix in refused.stderr


@pytest.mark.parametrize("words", [["--accept-licenses"], ["--miniforge", DIGEST]])
def test_options_of_cotainr_alone(words):
    argv = [sys.executable, "-m", "dray", "image", "build", "rocm", *words]
    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (
        78,
        "dray: --accept-licenses and --miniforge are for cotainr\n  fix:    --with cotainr\n",
    )


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "cotainr is not beside dray\n  wanted: cotainr 2025.7.1\n"),
        ("2024.10.0", "this cotainr is not the one that dray knows\n  wanted: cotainr 2025.7.1\n"
                      "  found:  cotainr 2024.10.0\n"),
    ],
)  # fmt: skip
def test_another_cotainr_or_none(version, said, tmp_path, monkeypatch):
    if version:
        about = tmp_path / f"cotainr-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cotainr\nVersion: {version}\n")
    found = list(metadata.distributions(name="cotainr", path=[str(tmp_path)]))

    def distribution(name: str) -> metadata.Distribution:
        if not found:
            raise metadata.PackageNotFoundError(name)
        return found[0]

    monkeypatch.setattr(cotainr.metadata, "distribution", distribution)
    with pytest.raises(UnfitError) as raised:
        cotainr.package()
    fix = "  fix:    make .venv/cotainr\n          or, where pip has installed dray: pip install cotainr==2025.7.1"
    assert str(raised.value) == said + fix


@pytest.mark.skipif(importlib.util.find_spec("cotainr") is None, reason="cotainr is not installed (make .venv/cotainr)")
def test_the_real_one_is_what_dray_takes_it_for():
    """Its own parser takes the words; its text names the file that `singularity` looks for, and the environment."""
    words = [str(word) for word in program.argv(Path("/in"), Path("/rootfs"), Path("/no/out.sif"), ())]
    code = "import sys; from cotainr.cli import CotainrCLI as C; print(vars(C(args=sys.argv[1:]).args))"
    words[words.index(f"--conda-env={Path('/in') / program.ENVIRONMENT}")] = f"--conda-env={__file__}"
    given = words[words.index("cotainr") + 1 :]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)
    assert "'base_image': '/rootfs'" in done.stdout, done.stderr
    assert "'accept_licenses': True, 'verbosity': 1" in done.stdout
    text = "".join(path.read_text() for path in cotainr.package().glob("*.py"))
    assert '"bash {installer_path.name} -b -s -p {self.prefix}"' in text
    for word in ("conda_installer.sh", "/opt/cotainr/conda", "conda_container_env", '"singularity"'):
        assert word in text
