"""Where a recipe or a site demands a signature, every node checks it before it starts the image."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from dray import render
from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.images.sif import sign
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.prepare import read_recipe

A, B = "A1" * 20, "B2" * 20
IMAGE = bytes(range(256)) * 4
# As `apptainer sif list` has them.
PARTS = """\
------------------------------------------------------------------------------
ID   |GROUP   |LINK    |SIF POSITION (start-end)  |TYPE
------------------------------------------------------------------------------
1    |1       |NONE    |32176-32697               |Def.FILE
3    |1       |NONE    |36864-462151680           |FS (Squashfs/*System/amd64)
4    |NONE    |1   (G) |462151680-462153345       |Signature (SHA-256)"""


def made(
    root: Path, folder: Path, *words: str, engine: str = "apptainer", site: tuple[str, ...] = (), **more: str
) -> Plan:
    image = {"bare": "python3", "docker": "dray:cpu"}.get(engine, str(folder / "my image.sif"))
    facts = Facts(scheduler="local" if engine in ("bare", "docker") else "slurm", nodelist="n1", nodes=1, engine=engine,
                  image=image, image_sha256=hashlib.sha256(IMAGE).hexdigest(), uid=7, gid=7)  # fmt: skip
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", words)
    at = Site(name="s", about="", image_signers=site, **more)
    return plan(recipe, at, facts, run_folder=PurePosixPath(folder / "run"), scratch=str(folder / "own"), dray="0")


def verified(*names: tuple[str, str]) -> str:
    keys = [{"Signer": {"Name": name, "Fingerprint": key, "KeyLocal": True, "KeyCheck": True}} for name, key in names]
    return json.dumps({"SignatureStore": [], "SignerKeys": keys}, indent=1)


@pytest.fixture
def node(root: Path, tmp_path: Path):
    """Run a node's script with a tool that prints this for `verify`, and says that it has started the image."""
    (tmp_path / "run" / "attempt-1" / "failures").mkdir(parents=True)
    (tmp_path / "my image.sif").write_bytes(IMAGE)
    tool = tmp_path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/bash\n"
        'echo "$@" >>"$CALLS"\n'
        'if [[ "$1" == verify ]]; then echo "$SAYS"; exit "$CODE"; fi\n'
        'if [[ "$1" == sif ]]; then echo "$PARTS"; exit; fi\n'
        "echo started\n"
    )
    tool.chmod(0o755)

    def run(says: str, code: int = 0, *, stage: str = "off", parts: str = PARTS) -> subprocess.CompletedProcess[str]:
        decided = made(root, tmp_path, f'image_signers=["{A}"]', stage=stage)
        env = {
            "PATH": f"{tool.parent}:/usr/bin:/bin",
            "SAYS": says,
            "CODE": str(code),
            "PARTS": parts,
            "CALLS": str(tmp_path / "calls"),
        }
        argv = ["bash", "-c", render.node_script(decided)]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)

    return run


@pytest.mark.parametrize("key", [A, A.lower()])
def test_an_image_that_is_signed_with_the_key_starts(node, tmp_path: Path, key: str) -> None:
    ended = node(verified(("somebody", B), ("me", key)))
    assert (ended.returncode, ended.stdout) == (0, "started\n"), ended.stderr
    first = (tmp_path / "calls").read_text().splitlines()[0]
    assert first == f"verify --local --json {tmp_path}/my image.sif"


def test_the_copy_on_the_node_is_what_is_checked(node, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "own.sif").write_bytes(IMAGE)
    ended = node(verified(("me", A)), stage=str(tmp_path / "disk"))
    assert ended.returncode == 0, ended.stderr
    first = (tmp_path / "calls").read_text().splitlines()[0]
    assert first == f"verify --local --json {tmp_path}/disk/own.sif"


ANOTHER = "it is signed with another key, or its parts are not in one group, and each group has signatures of its own"


@pytest.mark.parametrize(
    ("says", "code", "found"),
    [
        (verified(("me", B)), 0, ANOTHER),
        (verified((f'"Fingerprint":"{A}"', B)), 0, ANOTHER),
        (verified((f'"{A}', B)), 0, ANOTHER),
        (verified(("me", A)), 1, "} ] }"),
        ("FATAL: signature not found", 255, "FATAL: signature not found"),
        ('INFO: x\nFATAL: not signed\n{\n "Signatures": 0\n}', 255, "FATAL: not signed"),
        ("", 0, ANOTHER),
        ("", 127, ""),
    ],
)
def test_any_other_does_not(node, tmp_path: Path, says: str, code: int, found: str) -> None:
    ended = node(says, code)
    assert (ended.returncode, ended.stdout) == (69, "")
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    assert [" ".join(line.split()) for line in ended.stderr.splitlines()] == [
        "dray: the image lacks the required signature",
        f"where: {tmp_path}/my image.sif on node {host}",
        f"wanted: a signature with one of {A}",
        f"found: {found}".strip(),
        "fix: sign it with dray image sign; import the public key on every node: apptainer key import FILE",
    ]
    (record,) = (tmp_path / "run" / "attempt-1" / "failures").iterdir()
    written = json.loads(record.read_text())
    assert (written["code"], written["node"]) == (69, host)
    assert written["why"] == (f"the image lacks the required signature\n  wanted: a signature with one of {A}")


@pytest.mark.parametrize("parts", [PARTS + "\n5    |2  |NONE    |462155776-462176256  |FS", "", "another table"])
def test_a_part_that_another_may_have_signed_is_refused(node, parts: str) -> None:
    ended = node(verified(("me", A), ("other", B)), parts=parts)
    assert (ended.returncode, ended.stdout) == (69, "")
    assert f"  found:  {ANOTHER}\n" in ended.stderr


def test_without_a_demand_nothing_is_checked(root: Path, tmp_path: Path) -> None:
    assert "node::signed" not in render.node_script(made(root, tmp_path))


def test_the_plan_says_whose(root: Path, tmp_path: Path) -> None:
    decided = made(root, tmp_path, f'image_signers=["{A}", "{B}"]', site=(B,))
    assert decided.signers == (B,)
    assert made(root, tmp_path, site=(A, B)).signers == (A, B)
    assert f"  signed  with one of {B}: each node checks\n" in render.text(decided)


@pytest.mark.parametrize("engine", ["bare", "docker", "pyxis"])
def test_an_engine_that_checks_nothing_is_refused(root: Path, tmp_path: Path, engine: str) -> None:
    for words, site in (((f'image_signers=["{A}"]',), ()), ((), (A,))):
        with pytest.raises(ConfigError, match=f"{engine} cannot check who signed an image"):
            made(root, tmp_path, *words, engine=engine, site=site).refuse()


def test_a_recipe_and_a_site_that_trust_nobody_in_common(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the recipe and the site have no key in common"):
        made(root, tmp_path, f'image_signers=["{A}"]', site=(B,)).refuse()


@pytest.mark.parametrize("key", ["", "a1" * 20, "A1", "A1" * 21, "$(id)", f"{A}\n", f"0x{A[2:]}"])
def test_what_is_no_fingerprint(root: Path, tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="image_signers"):
        made(root, tmp_path, f"image_signers={json.dumps([key])}")


class TestVerify:
    @pytest.fixture
    def check(self, monkeypatch):
        """`dray image verify --key`, of an image that Apptainer says these have signed."""

        class Signed:
            path = Path("/i.sif")
            parts = ()

            def signers(self) -> list[str]:
                return [A]

        def run(*keys: str) -> list[str]:
            done = sign.Done(argv=(), code=0, out=verified(("me", A.lower())), err="")
            monkeypatch.setattr(sign, "_apptainer", lambda *_, **__: done)
            return sign.check(Signed(), keys)

        return run

    @pytest.mark.parametrize(
        "keys", [(), (A,), (f"0x{A.lower()}",), (" ".join(A[i : i + 4] for i in range(0, 40, 4)),), (B, A)]
    )
    def test_one_of_the_keys(self, check, keys: tuple[str, ...]) -> None:
        assert check(*keys) == [f"me {A}"]

    def test_another_key(self, check) -> None:
        with pytest.raises(ConfigError) as refused:
            check(B)
        assert str(refused.value) == (
            "the image is signed with another key\n"
            "  where:  /i.sif\n"
            f"  wanted: {B}\n"
            f"  found:  me {A}\n"
            "  fix:    ask the person who built it for an image that is signed with this key"
        )

    @pytest.mark.parametrize("key", ["", A[-16:], "me@host", A + "0"])
    def test_the_end_of_a_key_is_not_enough(self, check, key: str) -> None:
        with pytest.raises(ConfigError, match="not a key's fingerprint"):
            check(key)
