"""What a newcomer's first submission is told before it waits in a queue: images, ranks, launchers and programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import command
from dray.clients import docker
from dray.config import sites
from dray.config.site import Site
from dray.contract.findings import ConfigError, Finding
from dray.facts import Facts
from dray.fitness import doctor, network_and_site, new_site
from dray.images import store
from dray.planning import image, missing_facts
from dray.planning.schema import Plan
from dray.render import summary
from dray.runs.prepare import at_site, decide, read_recipe
from dray.runs.store import RunPaths
from helpers import ROOT

RAW = ["train.py"]


def facts(**more: object) -> Facts:
    given = {"scheduler": "slurm", "nodelist": "n1", "nodes": 1, "engine": "apptainer", "image": "/i.sif"}
    return Facts.model_validate({**given, **more})


def planned(*argv: str, overrides: tuple[str, ...] = (), **more: object) -> Plan:
    """A command's, as a login node plans it."""
    recipe = read_recipe(None, overrides, argv)
    return decide(recipe, *at_site(facts(login="here", account="p", **more)), RunPaths(Path("/runs/r")))


def dray(folder: Path, *words: str, **env: str) -> tuple[int, str, str]:
    ended = command.dray(*words, cwd=folder, **env)
    return ended.returncode, ended.stdout, ended.stderr


def test_interfaces_of_containers_are_not_the_machine_s(tmp_path: Path) -> None:
    for name in ("lo", "docker0", "veth1a2b", "hsn0/device", "ib0/device"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    assert network_and_site.interfaces(tmp_path) == ["hsn0", "ib0"]


class TestV100:
    """bf16 is emulated there, and a run would be slow without a word."""

    def made(self, *words: str, site: str = "iris", **more: object) -> Plan:
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ("image=cuda12", *words))
        seen = facts(login="here", account="p", gpus_per_node=4, site=site, **more)
        return decide(recipe, *at_site(seen), RunPaths(Path("/runs/r")))

    @pytest.mark.parametrize("site", ["iris", "taiwania2"])
    def test_bf16_is_refused_before_it_is_submitted(self, site: str) -> None:
        (refusal,) = (one for one in self.made("train.precision=bf16", site=site).findings if one.code)
        assert refusal._replace(where="") == Finding(
            "the GPUs of this site emulate bf16, without tensor cores",
            wanted="train.precision = fp16 or fp32", found="train.precision = bf16", fix="train.precision=fp16",
            code=78,
        )  # fmt: skip
        assert refusal.where == f"site {site}: {sites.find(site).about}"

    @pytest.mark.parametrize(
        ("words", "site", "precision"),
        [
            (("train.precision=fp16",), "iris", "fp16"),
            (("train.precision=fp32",), "iris", "fp32"),
            (("image=cpu", "gpus=none", "train.precision=bf16"), "iris", "bf16"),
            (("image=cuda", "train.precision=bf16"), "meluxina", "bf16"),
        ],
    )
    def test_what_the_recipe_says_stays(self, words: tuple[str, ...], site: str, precision: str) -> None:
        made = self.made(*words, site=site)
        assert (made.recipe.train.precision, [one for one in made.findings if one.code]) == (precision, [])

    def test_a_recipe_that_says_nothing_gets_what_the_machine_multiplies(self, tmp_path: Path) -> None:
        text = (ROOT / "recipes" / "smoke-cpu.toml").read_text()
        assert 'precision = "fp32"\n' in text
        (tmp_path / "r.toml").write_text(text.replace('precision = "fp32"\n', ""))
        why = " (the recipe sets none, and {} emulate bf16)"
        cases = (
            ("iris", "cuda12", (), f"fp16{why.format('the GPUs of site iris')}"),
            ("iris", "cpu", ("gpus=none",), f"fp32{why.format('many CPUs')}"),
            (
                "iris",
                "cpu",
                (
                    "gpus=none",
                    "train.precision=bf16",
                ),
                "bf16,",
            ),
            ("meluxina", "cuda", (), "bf16,"),
        )
        for site, variant, words, shown in cases:
            recipe = read_recipe(tmp_path / "r.toml", (f"image={variant}", *words))
            seen = facts(login="here", account="p", gpus_per_node=4, site=site)
            made = decide(recipe, *at_site(seen), RunPaths(Path("/runs/r")))
            assert (made.recipe.train.precision, [one for one in made.findings if one.code]) == (shown[:4], [])
            assert shown in made.reasons["training"]


class TestTheImage:
    @pytest.mark.parametrize(
        ("overrides", "more", "variant", "why"),
        [
            ((), {"site": "lumi"}, "rocm6", "for the GPUs of site lumi; the recipe sets none"),
            (("image=cpu",), {"site": "lumi"}, "cpu", "set in the recipe"),
            ((), {"site": "generic"}, "cpu", "the default; the recipe sets none"),
            ((), {"site": "lumi", "scheduler": "local"}, "cpu", "the default; the recipe sets none"),
            (
                (),
                {"site": "lumi", "image_given": True, "image_variant": "cpu"},
                "cpu",
                "from the image that you named; the recipe sets none",
            ),
            (
                (),
                {"site": "lumi", "image_given": True, "image_variant": "mine"},
                "rocm6",
                "for the GPUs of site lumi; the recipe sets none",
            ),
        ],
    )
    def test_the_sites_where_the_recipe_names_none(
        self, overrides: tuple[str, ...], more: dict[str, object], variant: str, why: str
    ) -> None:
        recipe, seen = read_recipe(None, overrides, RAW), facts(**more)
        assert image.variant(recipe, sites.choose(seen).site if "site" in more else None, seen) == (variant, why)

    def test_the_whole_plan_is_for_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").touch()
        made = planned("train.py", site="lumi", gpus_per_node=8)
        assert (made.variant, made.recipe.image, made.world.size) == ("rocm6", "rocm6", 8)
        assert made.pass_env == ("ROCR_VISIBLE_DEVICES",)
        assert made.reasons["image"] == "rocm6: for the GPUs of site lumi; the recipe sets none"
        with pytest.raises(ConfigError, match="a rocm6 run needs GPUs, and the scheduler gave none"):
            planned("train.py", site="lumi")

    def test_what_does_not_go_with_it_is_told(self) -> None:
        recipe = read_recipe(ROOT / "recipes" / "bert-mlm-analog.toml")
        table = recipe.model_dump(exclude_unset=True)
        named = type(recipe).model_validate({name: value for name, value in table.items() if name != "image"})
        with pytest.raises(ConfigError, match="the recipe with image=rocm6 has 1 error"):
            image.chosen(named, sites.find("lumi"), facts())

    def test_a_jobs_planner_asks_for_it(self) -> None:
        recipe = read_recipe(None, (), RAW)
        guessed = facts(image_variant="cpu", site="lumi")
        unseen = f"variables={' '.join(sites.find('lumi').folders())}"
        assert missing_facts.ask(recipe, sites.find("lumi"), guessed) == ["image=rocm6", unseen]
        known = {"image_variant": "rocm6", "paths": dict.fromkeys(sites.find("lumi").folders(), "there")}
        assert missing_facts.ask(recipe, sites.find("lumi"), guessed.model_copy(update=known)) == []

    @pytest.mark.parametrize(
        ("content", "found"), [(b"", "an empty file"), (b"#!/bin/sh\necho", "'#!/bin/sh\\necho'"), (b"\xff" * 99, None)]
    )
    def test_a_file_that_is_no_image(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, found: str | None
    ) -> None:
        file = tmp_path / "i.sif"
        file.write_bytes(content)
        monkeypatch.setenv("DRAY_IMAGE", str(file))
        with pytest.raises(ConfigError) as refused:
            store.required(ROOT, "cpu")
        assert refused.value.problem == "the file is not an image"
        assert found is None or refused.value.details["found"] == found

    @pytest.mark.parametrize("content", [b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0", b"hsqs and more"])
    def test_a_sif_or_a_squashfs_is_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
        file = tmp_path / "i.sif"
        file.write_bytes(content)
        monkeypatch.setenv("DRAY_IMAGE", str(file))
        assert store.required(ROOT, "cpu") == file

    @pytest.mark.seconds
    def test_a_dry_run_needs_none(self, tmp_path: Path) -> None:
        gone = str(tmp_path / "gone.sif")
        code, out, err = dray(tmp_path, "submit", "smoke-cpu", "--dry-run", DRAY_IMAGE=gone)
        assert (code, out.startswith("sbatch --parsable"), "\nranks     4 in all" in out) == (0, True, True)
        assert err == f"dray: note: {gone} does not exist; before you submit: make image-cpu\n"
        assert dray(tmp_path, "submit", "smoke-cpu", DRAY_IMAGE=gone)[0] == 78


class TestRanks:
    @pytest.mark.seconds
    def test_one_option_on_cpus_and_on_gpus(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").touch()
        words = ("plan", "--ranks", "4", "--json", "--sbatch=--account=p")
        for site, gpus in (("generic", "4: set in the recipe, since no GPUs are used"),
                           ("lumi", "4: one for each GPU that the scheduler gave")):  # fmt: skip
            code, out, _ = dray(tmp_path, *words, "--site", site, "--", "train.py")
            made = json.loads(out)
            assert (code, made["world"]["ranks_per_node"], made["reasons"]["ranks_per_node"]) == (0, 4, gpus)

    def test_beside_another_number_of_gpus_it_is_refused(self, tmp_path: Path) -> None:
        assert dray(tmp_path, "run", "--ranks", "4", "--gpus-per-node", "2", "--", "train.py") == (
            78,
            "",
            "dray: --ranks and --gpus-per-node differ, but each rank needs one GPU\n"
            "  found:  --ranks 4 and --gpus-per-node 2\n  fix:    leave out --gpus-per-node, or set --ranks 2\n",
        )


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("torchrun --nproc-per-node=4 train.py --x", "torchrun"),
        ("/opt/bin/torchrun train.py --x", "/opt/bin/torchrun"),
        ("accelerate launch train.py --x", "accelerate launch"),
        ("deepspeed train.py --x", "deepspeed"),
        ("mpirun -n 4 python train.py --x", "mpirun"),
        ("srun python train.py --x", "srun"),
        ("python3.11 -m torch.distributed.run train.py --x", "python3.11 -m torch.distributed.run"),
        ("python -m accelerate.commands.launch train.py --x", "python -m accelerate.commands.launch"),
        ("python train.py --launcher torchrun", None),
        ("accelerate config", None),
        ("python -m train", None),
        ("python", None),
        ("python -m", None),
    ],
)
def test_a_command_that_is_a_launcher_is_warned_of(command: str, found: str | None) -> None:
    warnings = [one for one in planned(*command.split(), site="generic").findings if one.level == "warning"]
    assert [one.found for one in warnings] == ([found] if found else [])
    assert not found or warnings[0].fix.startswith("--ranks N -- train.py --x   (")


class TestPrograms:
    def refused(self, *argv: str, **more: object) -> list[Finding]:
        return [one for one in planned(*argv, site="generic", **more).findings if one.code]

    def test_what_is_not_there_or_cannot_be_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("train.py", "start.sh"):
            (tmp_path / name).touch()
        (tmp_path / "package").mkdir()
        for argv, found, fix in (
            (["trian.py"], "trian.py is not a file", "correct the path; it starts in the current"),
            (
                ["./no/where"],
                "no/where is not a file",
                "correct the path; it starts in the current",
            ),
            (["./package"], "package is not a file", "correct the path; it starts in the current"),
            (["./start.sh"], "start.sh may not be executed", f"chmod +x {tmp_path}/start.sh"),
        ):
            (refusal,) = self.refused(*argv)
            assert (refusal.code, refusal.problem) == (78, "the command cannot be started")
            assert refusal.found == f"{tmp_path}/{found}"
            assert refusal.fix.startswith(fix)
        assert self.refused("train.py") == self.refused("python", "gone.py") == self.refused("/opt/in/the/image") == []
        (tmp_path / "start.sh").chmod(0o755)
        assert self.refused("./start.sh") == []

    def test_the_planner_of_a_job_knows_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        recipe = read_recipe(None, (), ["gone.py"])
        made = decide(recipe, *at_site(facts(site="generic")), RunPaths(Path("/runs/r")))
        assert [one for one in made.findings if one.code] == []


def test_a_command_knows_its_run() -> None:
    env = {one.name: one.value for one in planned("sh", site="generic").env}
    assert env["DRAY_RUN"] == "/runs/r"
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
    made = decide(recipe, *at_site(facts(site="generic")), RunPaths(Path("/runs/r")))
    assert "DRAY_RUN" not in {one.name for one in made.env}


def test_a_plan_is_ten_lines() -> None:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
    lines = summary(decide(recipe, *at_site(facts(site="generic")), RunPaths(Path("/runs/r")))).splitlines()
    names = ["recipe", "site", "image", "nodes", "ranks", "batch", "training", "memory", "launcher", "folder"]
    assert [line.split()[0] for line in lines] == names
    assert lines[7].startswith("memory    an estimate for 1,040,896 parameters; 0.1 GB on each node's host: weights")
    shown = summary(planned("sh", "-c", "a b", site="generic"))
    assert f"command   sh -c 'a b' in {Path.cwd()}\n" in shown
    assert "\nnote    the job gets one hour, the default of the batch script\n" in shown


@pytest.mark.seconds
def test_a_plan_is_whole_with_v(tmp_path: Path) -> None:
    _, short, _ = dray(tmp_path, "plan", "smoke-cpu")
    _, whole, _ = dray(tmp_path, "plan", "smoke-cpu", "-v")
    assert "\n-v shows all: each environment variable and bind with its source, " in short
    assert "TRITON_HOME" in whole
    assert "TRITON_HOME" not in short


class TestTheMachine:
    def test_a_new_site_file_has_what_doctor_asks_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv("DRAY_SITES", str(tmp_path))
        probed = new_site.Probed(cluster="", machine="login*")
        content = new_site.render("mine", probed)
        (tmp_path / "mine.toml").write_text(content)
        assert sites.detect("", "login3").site.name == "mine"
        offered = [line[2:] for line in content.splitlines() if line.startswith("# ") and " = " in line]
        by_key = {line.partition(" = ")[0] for line in offered}
        assert by_key == {
            "sbatch", "gpus_per_node", "cpus_per_node", "interfaces", "image", "gpu_memory_gb", "account", "gpu_option",
        }  # fmt: skip
        (tmp_path / "mine.toml").write_text(content.replace("\n# ", "\n").replace("No Slurm", "# No Slurm"))
        assert isinstance(sites.find("mine"), Site)  # each line is right where its mark is taken away

    @pytest.mark.parametrize(
        ("name", "pattern"),
        [("login3.site", "login*"), ("box", "box"), ("uan01", "uan*"), ("10", ""), ("a-1-2", "a-1-*"), ("", "")],
    )
    def test_the_pattern_of_a_machines_name(self, name: str, pattern: str) -> None:
        assert new_site._pattern(name) == pattern

    def test_docker_is_there_and_its_group_is_not_mine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The socket's permissions are tried for real; only the program that shows its version is a stand-in."""
        (tmp_path / "docker").write_text("#!/bin/sh\necho Docker version 28\n")
        (tmp_path / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
        monkeypatch.setattr(doctor, "_ENGINES", ("docker",))
        assert list(doctor._engines()) == [
            Finding(
                "engine",
                found="docker Docker version 28; no Docker Engine runs on this machine",
                fix="install Docker Engine and start it, or set DOCKER_HOST",
                code=69,
            )
        ]

        def refused(_: docker.Endpoint) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(docker, "_knock", refused)  # root may open any socket
        (finding,) = doctor._engines()
        assert (finding.level, finding.found) == (
            "error",
            "docker Docker version 28; the Docker Engine refuses this user",
        )
        assert finding.fix.startswith("add yourself to the docker group (sudo usermod -aG docker $USER)")
        monkeypatch.setattr(doctor, "_ENGINES", ("docker", "sh"))
        assert next(iter(doctor._engines())).level == "note"  # the other one will do
