"""Hostfiles: which machines there are, and which of them is this one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from dray.contract.findings import ConfigError
from dray.runs import local
from dray.runs.prepare import at_site, decide, read_recipe
from dray.runs.store import RunPaths


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> Path:
        (tmp_path / "my hosts").write_text(text)
        return tmp_path / "my hosts"

    return write


def test_the_form_that_deepspeed_has(file) -> None:
    found = local.read_hostfile(file("# two boxes\nbox1 slots=8\n\n10.0.0.2   slots=8 # the second\n"))
    assert (found.names, found.slots) == (("box1", "10.0.0.2"), 8)
    assert local.read_hostfile(file("a\nb")).slots is None


@pytest.mark.parametrize(
    "text",
    [
        "", "# nothing\n\n", "a slots=2\nb slots=4\n", "a slots=2\nb\n", "a\nb\na\n", "a slots=0\n", "a slots=x\n",
        "a 8\n",
        "a slots=8 max=9\n", "n[1-2]\n",
    ],
)  # fmt: skip
def test_hostfiles_that_are_none(file, text: str) -> None:
    with pytest.raises(ConfigError, match="the hostfile is not valid") as refused:
        local.read_hostfile(file(text))
    assert "slots=N" in refused.value.finding.wanted


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the hostfile cannot be read"):
        local.read_hostfile(tmp_path / "gone")
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="the hostfile is not UTF-8 text"):
        local.read_hostfile(tmp_path / "odd")


class TestHere:
    """This machine's line."""

    def test_by_name(self, file) -> None:
        assert local.read_hostfile(file(f"198.51.100.1\n{socket.gethostname()}.example.invalid\n")).here() == 1

    def test_as_it_is_told(self, file) -> None:
        found = local.read_hostfile(file("198.51.100.1\n198.51.100.2\n"))
        assert found.here(1) == 1
        with pytest.raises(ConfigError, match="it is not clear which line of the hostfile is this machine"):
            found.here(2)

    def test_not_there_and_there_twice(self, file) -> None:
        with pytest.raises(ConfigError, match="it is not clear which line of the hostfile is this machine"):
            local.read_hostfile(file("198.51.100.1\n198.51.100.2\n")).here()
        with pytest.raises(ConfigError, match="it is not clear which line of the hostfile is this machine"):
            local.read_hostfile(file("{0}.a\n{0}.b\n".format(socket.gethostname()))).here()


def test_all_machines_have_the_same_facts(file, root: Path, monkeypatch) -> None:
    monkeypatch.setattr(local, "image_of", lambda *_: "/p")
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
    found = local.read_hostfile(file("a\nb\n"))
    facts = found.facts(recipe, run="r", engine="bare", gpus_per_node=0, site="lumi")
    assert (facts.hosts(), facts.scheduler, facts.site) == (["a", "b"], "hosts", "lumi")
    assert facts.port == found.facts(recipe, run="r", engine="bare", gpus_per_node=0, site="lumi").port


@pytest.mark.parametrize(("engine", "seen"), [("bare", False), ("docker", True)])
def test_a_container_sees_hf_home(file, root: Path, tmp_path: Path, monkeypatch, engine, *, seen: bool) -> None:
    """A bare machine has its own, which need not be the others'."""
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(local, "image_of", lambda *_: "i")
    facts = local.read_hostfile(file("a\nb\n")).facts(recipe, run="r", engine=engine, gpus_per_node=0, site="")
    decided = decide(recipe, *at_site(facts), RunPaths(tmp_path / "r"))
    assert (str(tmp_path) in [bind.path for bind in decided.binds]) is seen
    assert (("HF_HOME", str(tmp_path)) in [(one.name, one.value) for one in decided.env]) is seen
    monkeypatch.setenv("HF_HOME", "relative")
    assert local.facts(recipe, engine="docker", image="i", nodes=1, gpus_per_node=0, site="").hf_home is None


class TestSecret:
    """What machines without a shared folder prove to one another."""

    @staticmethod
    def machines(folder: Path, text: str = "n1\nn2\n") -> local.Hosts:
        (folder / "hosts").write_text(text)
        return local.read_hostfile(folder / "hosts")

    def test_one_machine_needs_none(self, tmp_path: Path) -> None:
        assert self.machines(tmp_path, "n1\n").secret(None) == ""

    def test_several_machines_are_told_the_line_that_makes_one(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            self.machines(tmp_path).secret(None)
        line, _, after = refused.value.details["fix"].partition(", then")
        assert after == " copy it to each machine and add --secret ~/.dray-secret"
        subprocess.run(["bash", "-c", line], env={**os.environ, "HOME": str(tmp_path)}, check=True)
        assert re.fullmatch("[0-9a-f]{64}", self.machines(tmp_path).secret(tmp_path / ".dray-secret"))

    @pytest.mark.parametrize(("mode", "text"), [(0o640, "5" * 64), (0o600, "5" * 31), (0o600, "é" * 64)])
    def test_a_file_that_is_no_secret(self, tmp_path: Path, mode: int, text: str) -> None:
        (tmp_path / "secret").write_text(text)
        (tmp_path / "secret").chmod(mode)
        with pytest.raises(ConfigError, match="the secret is weak") as refused:
            self.machines(tmp_path).secret(tmp_path / "secret")
        assert refused.value.finding.found == f"mode {mode:o}, {len(text)} characters"
