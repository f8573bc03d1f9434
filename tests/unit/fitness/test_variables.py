"""The environment of ranks against the rules: typos, what hurts, what is overridden, what stays outside."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from command import dray
from dray.config.site import Site, SiteVariable
from dray.contract.findings import Finding
from dray.facts import Facts
from dray.fitness import variables
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.prepare import read_recipe


def made(root: Path, *overrides: str, nodes: int = 2, site: Site | None = None, gpus: int = 0) -> Plan:
    facts = Facts(
        scheduler="slurm", nodelist=f"n[1-{nodes}]" if nodes > 1 else "n1", nodes=nodes, engine="apptainer",
        image="/i.sif", gpus_per_node=gpus,
    )  # fmt: skip
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", overrides)
    return plan(
        recipe,
        site or Site(name="s", about=""),
        facts,
        run_folder=PurePosixPath("/r"),
        scratch="/tmp/dray-7-r",
        dray="0",
    )


def about(found: list[Finding], name: str) -> list[tuple[str, str, str]]:
    return [(one.level, one.where, one.found) for one in found if one.problem.partition("=")[0] == name]


def test_the_rules_are_dated_cited_and_can_be_read() -> None:
    rules = variables.rules()
    assert len(rules) > 1000
    count = 0
    for of_name in rules.values():
        for rule in of_name:
            count += 1
            assert rule.keys() <= {
                "name", "value", "accelerator", "nodes", "level", "problem", "fix", "source", "date", "also", "unless",
                "unless_option",
            }  # fmt: skip
            assert {"level", "problem", "fix", "source", "date"} <= rule.keys()
            assert rule["level"] in ("error", "warning")
            assert rule.get("accelerator", "cpu") in ("cpu", "cuda", "rocm")
            assert rule.get("nodes", "one") in ("one", "several")
            assert re.fullmatch(r"20\d\d-\d\d", rule["date"])
            re.compile(rule.get("value", ""))
    assert count >= 40


@pytest.mark.parametrize(
    ("typo", "correct"),
    [
        ("CCL_NET_GDR_LEVEL", "NCCL_NET_GDR_LEVEL"),  # a letter less
        ("NCCL_SOCKET_IFNAMEE", "NCCL_SOCKET_IFNAME"),  # one more
        ("NCCL_SOCKET_IFNANE", "NCCL_SOCKET_IFNAME"),  # another
        ("FI_PROVIDRE", "FI_PROVIDER"),  # two swapped
        ("NCCL_SOCKET_IFNAME", None),
        ("PATH", None),
        ("HOME", None),
        ("", None),
    ],
)
def test_a_typo_of_one_letter_is_found(typo: str, correct: str | None) -> None:
    assert variables._correct(typo) == correct


def test_no_known_name_is_taken_for_a_typo_of_another() -> None:
    assert [name for name in variables.rules() if variables._correct(name)] == []


def test_a_misspelt_one_in_a_site_is_an_error_and_in_the_shell_a_warning(root: Path) -> None:
    site = Site(name="s", about="", env=(SiteVariable(name="CCL_NET_GDR_LEVEL", value="3", why="w"),))
    found = variables.check(made(root, site=site), {"NCCL_DEBGU": "INFO"})
    typo = "nothing reads it; did you mean NCCL_NET_GDR_LEVEL?"
    assert about(found, "CCL_NET_GDR_LEVEL") == [("error", "site s", typo)]
    assert about(found, "NCCL_DEBGU") == [("warning", "your shell", "nothing reads it; did you mean NCCL_DEBUG?")]


def test_what_hangs_on_rocm_is_an_error_there_alone(root: Path) -> None:
    for image, nodes, verdicts in (("rocm", 2, {"error"}), ("rocm", 1, set()), ("cuda", 2, set())):
        size = f"batch.global_size={8 * nodes}"
        plan = made(root, f"image={image}", "env.NCCL_NET_GDR_LEVEL=PHB", size, nodes=nodes, gpus=2)
        found = about(variables.check(plan, {}), "NCCL_NET_GDR_LEVEL")
        assert {verdict for verdict, *_ in found} == verdicts, image


def test_a_pair_that_fights_needs_both(root: Path) -> None:
    for arguments, count in (
        (["env.ROCR_VISIBLE_DEVICES=0"], 0),
        (["env.ROCR_VISIBLE_DEVICES=0", "env.HIP_VISIBLE_DEVICES=0"], 1),
    ):
        plan = made(root, "image=rocm", *arguments, gpus=2)
        assert len(about(variables.check(plan, {}), "ROCR_VISIBLE_DEVICES")) == count


def test_errors_and_warnings_are_printed_before_a_run(root: Path) -> None:
    plan = made(root, "env.FI_MR_CACHE_MONITOR=memhooks")
    (finding,) = variables.warnings(plan, {"NCCL_DEBUG": "INFO"})
    assert (finding.problem, finding.where) == ("FI_MR_CACHE_MONITOR=memhooks", "recipe")
    assert (finding.found, finding.level) == ("deadlocks with the NCCL plugin", "warning")  # and the run starts
    assert variables.warnings(made(root), {}) == []


class TestPlan:
    def run(self, root: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        return dray("plan", "recipes/smoke-cpu.toml", *options, cwd=root, **{"DRAY_HOME": str(root), **env})

    @pytest.mark.seconds
    def test_it_warns_with_the_fix_and_the_source(self, root: Path) -> None:
        ended = self.run(root, "env.FI_MR_CACHE_MONITOR=memhooks")
        assert ended.returncode == 0
        warning = ended.stdout.partition("warning FI_MR_CACHE_MONITOR=memhooks: deadlocks with the NCCL plugin\n")[2]
        assert [line[:16] for line in warning.splitlines()[:3]] == [
            f"{'':<8}{name:<8}" for name in ("where:", "fix:", "source:")
        ]

    @pytest.mark.seconds
    def test_no_value_of_the_shells_is_shown_whatever_its_name(self, root: Path) -> None:
        env = {"HF_TOKN": "hf_very_secret", "HF_ENDPOINT": "https://me:very_secret@h", "OMP_NUM_THREADS": "very_secret"}
        ended = self.run(root, **env)
        assert "HF_TOKN=(set): nothing reads it; did you mean HF_TOKEN?" in ended.stdout
        for shown in (ended, self.run(root, "--format", "json", HF_TOKEN="hf_very_secret")):
            assert "very_secret" not in shown.stdout + shown.stderr
