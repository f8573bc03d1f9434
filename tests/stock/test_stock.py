"""README's `make image-cpu` on a machine that nobody has prepared, with no option: from the registry to the SIF.

Always an image without torch is made; on their days all that the image needs is fetched, and the image is made.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from functools import cache

import pytest
from stock import machine, walk
from stock.machine import USER, Ended
from stock.walk import Walk

from helpers import ROOT


@cache
def _missing() -> str | None:
    if os.getuid() != 0:
        return "only root can mount and be another user"
    programs = ("dockerd", "docker-registry", "mmdebstrap", "gpg", "dpkg-deb", "openssl", "nsenter", "setpriv")
    missing = [program for program in programs if not shutil.which(program)]
    return f"not installed: {', '.join(missing)}" if missing else None


@pytest.fixture(scope="module")
def stock() -> Iterator[Walk]:
    if why := _missing():
        pytest.fail(f"DRAY_TEST_ALL=1, and {why}") if os.environ.get("DRAY_TEST_ALL") == "1" else pytest.skip(why)
    with walk.prepared(ROOT / "build/stock-cache", ROOT / "build/stock") as prepared:
        yield prepared
        prepared.write_table()


@pytest.fixture(scope="module")
def built(stock: Walk) -> Ended:
    """The command, as README writes it; a careful user's umask."""
    ended = stock.typed("make image-cpu", log="image-cpu", umask="077")
    assert ended.code == 0, ended.out
    return ended


def test_the_checkout_differs_from_head_in_digests_alone(stock: Walk) -> None:
    assert walk.differences(stock.checkout) == []
    assert walk.changed(stock.checkout) >= {"containers/cluster/Containerfile", "containers/cpu/image.toml"}


@pytest.mark.slow
def test_one_command_makes_the_image_and_then_finds_it(stock: Walk, built: Ended) -> None:
    assert re.search(r"build/dray-cpu\.sif'?  \d+ MB  sha256:[0-9a-f]{64}  \(\d+ s\)\n", built.out)
    program = "import dray, torch, transformers; print(torch.__version__, torch.ones(2).sum().item())"
    ran = runs(stock, program, log="image-runs")
    assert ran.code == 0, ran.out
    assert "2.13.0+cpu 2.0" in ran.out.splitlines()
    before = len(stock.seen)
    again = stock.typed("make image-cpu", log="image-cpu-again")
    assert again.code == 0, again.out
    assert "the image exists, built from the same inputs" in again.out
    assert again.seconds < 10
    assert stock.seen[before:] == []


@pytest.fixture(scope="module")
def fetched(stock: Walk) -> Walk:
    """All that the image is made of; the walk that has built it has fetched that already."""
    if "image-cpu" not in stock.times:
        bundle = "make install && .venv/bin/dray image bundle cpu --out build/bundle"
        ended = stock.typed(bundle, log="bundle-cpu", umask="077")
        assert ended.code == 0, ended.out
    return stock


@pytest.mark.slow
def test_the_wheel_of_torch_came_from_the_index_that_image_toml_names(fetched: Walk) -> None:
    (wheel,) = (request for request in fetched.seen if request.path.endswith(".whl") and request.status == 200)
    assert wheel.host == fetched.index
    assert "/torch-2.13.0+cpu-" in wheel.path


@pytest.mark.slow
def test_mirrors_give_the_same_image(stock: Walk, built: Ended) -> None:
    """On a machine where none of these names is known."""
    block = stock.block
    text = (stock.checkout / "containers/cpu/image.toml").read_text()
    index = re.findall(r'(?m)^index = "(https://[^/]+)', text)[0]
    mirrors = {
        "docker.io": f"{block}.2/hub",
        index: f"https://{block}.1",
        f"http://{walk.ARCHIVE}": f"http://{block}.1",
    }
    mirrors |= {f"http://{host}": f"http://{block}.1" for host in set(stock.debian.hosts.values())}
    file = stock.machine.home / "mirrors.toml"
    file.write_text("[mirrors]\n" + "".join(f'"{name}" = "{mirror}"\n' for name, mirror in mirrors.items()))
    before = len(stock.seen)
    with machine.started(hosts={}, ca=stock.signed.ca, scratch=stock.scratch, logs=stock.machine.logs) as other:
        other.root(f"chown {USER}: {file}; cd '{stock.checkout}/build'; rm -r base debs inputs wheels/torch-*")
        found = stock.typed("make image-cpu", log="image-cpu-by-mirrors", env={"DRAY_MIRRORS": str(file)}, on=other)
    assert found.code == 0, found.out
    assert "the image exists, built from the same inputs" in found.out
    assert {request.host for request in stock.seen[before:]} == {f"{block}.1"}


@pytest.fixture(scope="module")
def tiny(stock: Walk) -> Walk:
    """The checkout with a variant of the user's own in the place of cpu: without torch, and locked by them."""
    folder = stock.checkout / "containers/cpu"
    described = re.sub(r"(?ms)^\[\[vendor\]\]\n.*?(?=^\[)", "", (folder / "image.toml").read_text())
    (folder / "image.toml").write_text(described)
    (folder / "requirements.in").write_text("packaging\n")
    shutil.copyfile(walk.HERE / "tiny.def", folder / "dray-cpu.def")
    installed = stock.typed("make install", log="install", umask="077")
    assert installed.code == 0, installed.out
    uv = ".venv/bin/python -m pip install -qq --require-hashes --constraint containers/venv.lock uv"
    locked = stock.typed(f"{uv} && .venv/bin/dray image lock cpu", log="lock-tiny")
    assert locked.code == 0, locked.out
    by_docker = stock.typed("make image-cpu", log="tiny-by-docker")
    assert by_docker.code == 0, by_docker.out
    return stock


def runs(stock: Walk, program: str, *, log: str) -> Ended:
    """Python in the image of build/, by the builder's Apptainer, which unpacks it: there is no /dev/fuse."""
    security = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    return stock.typed(
        f'docker run --rm --network none --user "$(id -u):$(id -g)" {security} '
        f'--volume "$PWD/build/dray-cpu.sif:/image.sif:ro" dray:builder '
        f"apptainer exec --unsquash --cleanenv /image.sif python3 -c '{program}'",
        log=log,
    )


def test_an_image_without_torch_is_made(tiny: Walk) -> None:
    ran = runs(tiny, "import dray, packaging", log="tiny-runs")
    assert ran.code == 0, ran.out


def test_what_the_mirror_dropped_and_nothing_else_came_from_the_archive(tiny: Walk) -> None:
    files = {
        request.path
        for request in tiny.seen
        if request.host == walk.ARCHIVE and "/pool/" in request.path and request.status == 200
    }
    stamp = (tiny.checkout / "containers/debian-amd64.lock").read_text().splitlines()[0].removeprefix("# archive ")
    names = {path.rpartition("/")[2].partition("_")[0] for path in files}
    assert names == {walk.GONE, *tiny.debian.hashes}
    assert {path.split("/")[3] for path in files} == {stamp}


@pytest.mark.slow
def test_podman_of_an_ordinary_user_builds(tiny: Walk) -> None:
    home = tiny.machine.home
    # Podman's own limits are above those that a container may set.
    limits = ", ".join(
        f'"{name}={number}:{number}"'
        for name, what in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))
        for number in [min(one for one in (30_000, *resource.getrlimit(what)) if one > 0)]
    )
    settings = f'[containers]\ndefault_ulimits = [{limits}]\n[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\n'
    (home / "containers.conf").write_text(settings)
    socket = "unix://$XDG_RUNTIME_DIR/podman.sock"
    command = f"""podman system service --time 0 {socket} & service=$!
until [[ -S $XDG_RUNTIME_DIR/podman.sock ]]; do sleep 0.1; done
rm -f build/dray-cpu.sif*
DOCKER_HOST={socket} make image-cpu
code=$?
kill $service
wait
exit $code"""
    uid = tiny.machine.root(f"id -u {USER}").stdout.strip()
    env = {"XDG_RUNTIME_DIR": f"/run/user/{uid}", "CONTAINERS_CONF": str(home / "containers.conf")}
    ended = tiny.typed(command, log="tiny-by-podman", env=env)
    assert ended.code == 0, ended.out
    assert runs(tiny, "import dray, packaging", log="tiny-runs").code == 0


@pytest.mark.slow
def test_apptainer_alone_builds(tiny: Walk) -> None:
    """In a container, where there is neither Docker nor root; in a folder without a space, which Apptainer wants."""
    alone = tiny.scratch / "alone"
    copied = tiny.machine.root(
        f"""mkdir {alone} && tar -C '{tiny.checkout}' --exclude=./.venv --exclude=./build -c . | tar -C {alone} -x
printf 'FROM dray:builder\\nUSER root\\nRUN apt-get -qq update && apt-get -qq install --no-install-recommends \
  ca-certificates make python3-venv\\n' | docker build --quiet --network host --tag alone -
chown -R {USER}: {alone}"""
    )
    assert copied.returncode == 0, copied.stderr
    security = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    ended = tiny.typed(
        f'docker run --rm --network host --user "$(id -u):$(id -g)" {security} --volume {bundle}:{bundle}:ro '
        f"--env SSL_CERT_FILE={bundle} --env PIP_CERT={bundle} --volume {alone}:{alone} --workdir {alone} alone "
        "sh -c 'make image-cpu && apptainer exec --unsquash build/dray-cpu.sif python3 -c \"import dray, packaging\"'",
        log="tiny-by-apptainer-alone",
    )
    assert ended.code == 0, ended.out
