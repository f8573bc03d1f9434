"""accelerate's configuration for a script: derived from [command], over a user's own file."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from dray.config import accelerate_file
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract.findings import ConfigError, Finding
from dray.facts import Facts
from dray.planning import accelerate
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.prepare import read_recipe
from helpers import ROOT

PLAIN = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "mixed_precision": "no",
    "rdzv_backend": "dray",
    "same_network": False,
}
FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_version": 2,
}
ZERO = {"deepspeed_multinode_launcher": "standard"}
NO_YAML = "accelerate's file is not valid YAML\n"
OF_ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: c10d
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP1 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
mixed_precision: bf16
"""


def recipe(folder: Path, *words: str, file: str | None = None, deepspeed: object = None) -> Recipe:
    """A script's, with a file of its own."""
    if file is not None:
        (folder / "my a.yaml").write_text(file)
        words = ("accelerate=my a.yaml", *words)
    if deepspeed is not None:
        (folder / "ds.json").write_text(json.dumps(deepspeed, indent=1))
    (folder / "r.toml").write_text('name = "r"\nlauncher = "accelerate"\n[command]\nargv = ["t.py"]\n')
    return read_recipe(folder / "r.toml", words)


def files(found: Recipe) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in accelerate.files(found, "/a").items()}


def planned(found: Recipe, **facts: Any) -> Plan:
    seen = {"scheduler": "slurm", "job": 1, "nodelist": "n[1-2]", "nodes": 2, "engine": "apptainer", "gpus_per_node": 4}
    return plan(
        found, Site(name="s", about=""), Facts.model_validate({**seen, "image": "/i.sif", **facts}),
        run_folder=PurePosixPath("/r"), scratch="/s", dray="0",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), PLAIN),
        (("command.precision=fp32",), PLAIN),
        (("command.precision=fp8",), {**PLAIN, "mixed_precision": "fp8"}),
        (
            ("command.strategy=fsdp", "command.precision=bf16"),
            {**PLAIN, "distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": FSDP},
        ),
        *(
            (
                (f"command.strategy=zero{stage}", "command.precision=fp16"),
                {
                    **PLAIN,
                    "distributed_type": "DEEPSPEED",
                    "mixed_precision": "fp16",
                    "deepspeed_config": {
                        **ZERO,
                        "zero_stage": stage,
                        "zero3_init_flag": stage == 3,
                        "zero3_save_16bit_model": stage == 3,
                    },
                },
            )
            for stage in (1, 2, 3)
        ),
    ],
)
def test_what_is_derived_from_the_recipe(tmp_path: Path, words: tuple[str, ...], wanted: dict) -> None:
    assert files(recipe(tmp_path, *words)) == {"accelerate.json": wanted}


def test_the_trainer_s_own_ranks_are_started_and_no_more() -> None:
    found = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["launcher=accelerate", "train.strategy=fsdp"])
    assert files(found) == {"accelerate.json": PLAIN}
    with pytest.raises(ConfigError, match="dray's trainer is configured in \\[train\\]"):
        read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["launcher=accelerate", "accelerate=a.yaml"])


def test_the_users_file_decides_and_keeps_what_only_accelerate_knows(tmp_path: Path) -> None:
    found = recipe(tmp_path, file=OF_ACCELERATE)
    assert found.command
    assert (found.command.strategy, found.command.precision) == ("fsdp", "bf16")
    assert files(found) == {
        "accelerate.json": {
            **PLAIN,
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "debug": False,
            "downcast_bf16": "no",
            "machine_rank": 0,
            "main_training_function": "main",
            "num_machines": 2,
            "num_processes": 8,
            "tpu_env": [],
            "tpu_use_cluster": False,
            "tpu_use_sudo": False,
            "fsdp_config": {
                **FSDP,
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_activation_checkpointing": True,
                "fsdp_reshard_after_forward": True,
            },
        }
    }
    made = planned(found)
    assert [one for one in made.findings if "accelerate" in one.problem] == [ON_A_CPU]
    assert made.files == accelerate.files(found, made.folder)


ON_A_CPU = Finding(
    "on a CPU transformers' Trainer and accelerate silently train without FSDP and DeepSpeed",
    wanted="GPUs",
    found="image = cpu",
    fix="image=cuda; or plain data parallelism, which it is on a CPU: command.strategy=ddp",
)


def test_a_json_file_and_bare_words_of_yaml(tmp_path: Path) -> None:
    found = recipe(tmp_path, file='{"distributed_type": "FSDP", "fsdp_config": {"version": 2, "offload_params": true}}')
    assert files(found)["accelerate.json"]["fsdp_config"] == {**FSDP, "fsdp_offload_params": True}
    assert files(recipe(tmp_path, file="fsdp_config: {fsdp_version: 2}\n")) == files(
        recipe(tmp_path, "command.strategy=fsdp")
    )
    found = recipe(tmp_path, file="mixed_precision: BF16\n")
    assert found.command
    assert found.command.precision == "bf16"
    found = recipe(tmp_path, file="distributed_type: NO\nmixed_precision: no\n")
    assert found.command
    assert (found.command.strategy, found.command.precision) == ("ddp", "fp32")
    assert files(found) == {"accelerate.json": PLAIN}


def test_a_deepspeed_file_gets_stage_and_precision_and_stands_alone(tmp_path: Path) -> None:
    """accelerate refuses mixed_precision beside it, and takes pdsh where nobody names a launcher."""
    given = {"zero_optimization": {"stage": "auto", "overlap_comm": True}, "train_batch_size": "auto"}
    words = ("command.deepspeed=ds.json", "command.strategy=zero3", "command.precision=bf16")
    made = files(recipe(tmp_path, *words, deepspeed=given))
    assert made == {
        "accelerate.json": {
            **{key: value for key, value in PLAIN.items() if key != "mixed_precision"},
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {**ZERO, "zero3_init_flag": True, "deepspeed_config_file": "/a/deepspeed.json"},
        },
        "deepspeed.json": {
            "zero_optimization": {"stage": 3, "overlap_comm": True},
            "train_batch_size": "auto",
            "fp16": {"enabled": False},
            "bf16": {"enabled": True},
        },
    }
    named = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    given["zero_optimization"] = {"stage": 3, "overlap_comm": True}
    assert files(recipe(tmp_path, file=named, deepspeed=given)) == made


@pytest.mark.parametrize("section", [True, None, [1]])
def test_a_section_that_is_no_table_is_replaced(tmp_path: Path, section: object) -> None:
    given = {"zero_optimization": {"stage": 2}, "bf16": section, "fp16": section}
    words = ("command.deepspeed=ds.json", "command.strategy=zero2", "command.precision=bf16")
    wanted = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    assert files(recipe(tmp_path, *words, deepspeed=given))["deepspeed.json"] == wanted
    given["zero_optimization"] = section
    assert files(recipe(tmp_path, *words, deepspeed=given))["deepspeed.json"] == wanted


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "file", "deepspeed", "said"),
    [
        (
            ("command.deepspeed=ds.json", "command.precision=fp16"), None,
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
            "command.precision and bf16.enabled do not agree\n",
        ),
        (
            ("command.deepspeed=ds.json", "command.strategy=fsdp"), None, {"zero_optimization": {"stage": 2}},
            "command.strategy and zero_optimization.stage do not agree\n",
        ),
        (("command.deepspeed=ds.json",), None, {"zero_optimization": "x"}, "DeepSpeed's ZeRO stage is missing\n"),
        (("command.deepspeed=gone.json",), None, None, "the DeepSpeed file cannot be read\n"),
        (
            ("command.deepspeed=ds.json", "command.precision=fp8"), None, {"zero_optimization": {"stage": 2}},
            "recipe {folder}/r.toml has 1 error\n",
        ),
        ((), "distributed_type: DEEPSPEED\n", None, "accelerate's deepspeed_config.zero_stage has a value"),
        ((), "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n", None, "accelerate's deepspeed_conf"),
        (
            (), "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}\n", None,
            "the DeepSpeed file cannot be read\n",
        ),
        (
            (),
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json, gradient_clipping: 1.0}\n",
            {"zero_optimization": {"stage": 2}},
            "accelerate takes these keys from the DeepSpeed file only\n",
        ),
        (
            (), "distributed_type: FSDP\nfsdp_config: {version: 2, reshard_after_forward: FULL_SHARD}\n", None,
            "accelerate's fsdp_config.fsdp_reshard_after_forward has a value that dray does not support\n",
        ),
        ((), "distributed_type: MEGATRON_LM\n", None, "accelerate's distributed_type has a value that dray does not"),
        ((), "mixed_precision: tf32\n", None, "accelerate's mixed_precision has a value that dray does not support\n"),
        ((), "compute_environment: AMAZON_SAGEMAKER\n", None, "accelerate's compute_environment has a value"),
        ((), "fsdp_config: [1]\n", None, "accelerate's fsdp_config has a value that dray does not support\n"),
        ((), "nmu_processes: 8\n", None, "accelerate does not know this key\n"),
        ((), "a: 1\n", None, "accelerate does not know this key\n"),
        ((), "a: !!python/object/apply:os.system [id]\n", None, NO_YAML),
        ((), "a: 2026-01-01\n", None, NO_YAML),
        ((), "a: [1\n", None, NO_YAML),
        ((), "[" * 5000, None, NO_YAML),
        ((), "a: .nan\n", None, NO_YAML),
        ((), "a: " + "x" * (256 << 10), None, "accelerate's file cannot be read\n"),
        ((), "fsdp_config: {sharding_strategy: 1}\n", None, "the file is for FSDP1, which torch has replaced\n"),
        ((), "deepspeed_config: {deepspeed_config_file: [1]}\n", None, "accelerate's deepspeed_config.zero_stage"),
        ((), "", None, "accelerate's file is not a table\n"),
        ((), "- 1\n", None, "accelerate's file is not a table\n"),
        (("accelerate=gone.yaml",), None, None, "accelerate's file cannot be read\n"),
        (("launcher=torchrun", "command.strategy=fsdp"), None, None, "recipe {folder}/r.toml has 1 error\n"),
        (("command.strategy=tp",), None, None, "recipe {folder}/r.toml has 1 error\n"),
    ],
)  # fmt: skip
def test_a_file_that_dray_refuses(
    tmp_path: Path, words: tuple[str, ...], file: str | None, deepspeed: object, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(tmp_path, *words, file=file, deepspeed=deepspeed)
    assert str(refused.value).startswith(
        said.replace("{path}", f"{tmp_path}/my a.yaml").replace("{folder}", f"{tmp_path}")
    )
    assert refused.value.exit_code == 78


@pytest.mark.parametrize(
    "line",
    [
        "gpu_ids: '0'",
        "use_cpu: true",
        "enable_cpu_affinity: true",
        "mpirun_config: {mpirun_hostfile: h}",
        "mixed_precision: fp16",
        "distributed_type: FSDP",
        "deepspeed_config: {deepspeed_multinode_launcher: pdsh, zero_stage: 3}",
    ],
)
def test_the_recipe_and_the_scheduler_win_over_the_file(tmp_path: Path, line: str) -> None:
    words = ("image=cuda", "command.strategy=zero2", "command.precision=bf16")
    found = recipe(tmp_path, *words, file=f"{line}\n")
    assert found.command
    assert (found.command.strategy, found.command.precision) == ("zero2", "bf16")
    assert files(found) == files(recipe(tmp_path, *words))


@pytest.mark.parametrize(
    ("words", "file", "kind"),
    [
        (
            ("command.strategy=fsdp",),
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n", "FSDP",
        ),
        (("command.strategy=ddp",), "deepspeed_config: {deepspeed_config_file: [1]}\n", "MULTI_GPU"),
        (("command.strategy=ddp",), FSDP1, "MULTI_GPU"),
        (("command.strategy=ddp",), "distributed_type: MEGATRON_LM\n", "MULTI_GPU"),
        (("command.strategy=fsdp",), "distributed_type: MEGATRON_LM\n", "FSDP"),
        (
            ("command.strategy=zero2",), "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n",
            "DEEPSPEED",
        ),
        (("command.deepspeed=ds.json",), FSDP1, "DEEPSPEED"),
        (("command.precision=bf16",), "mixed_precision: tf32\n", "MULTI_GPU"),
    ],
)  # fmt: skip
def test_what_command_overrides_may_be_anything(tmp_path: Path, words: tuple[str, ...], file: str, kind: str) -> None:
    """Also what would be refused without [command]."""
    found = recipe(tmp_path, "image=cuda", *words, file=file, deepspeed={"zero_optimization": {"stage": 2}})
    assert found.command
    assert (found.command.deepspeed is not None) == ("command.deepspeed=ds.json" in words)
    assert files(found)["accelerate.json"]["distributed_type"] == kind


def test_the_deepspeed_file_of_a_file_stays_beside_the_strategy(tmp_path: Path) -> None:
    file = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 3}\n"
    found = recipe(tmp_path, "command.strategy=zero2", file=file, deepspeed={"zero_optimization": {"stage": "auto"}})
    assert files(found)["deepspeed.json"]["zero_optimization"] == {"stage": 2}
    with pytest.raises(ConfigError, match="the file is for FSDP1"):
        recipe(tmp_path, "command.strategy=fsdp", file=FSDP1)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("command.strategy=zero2",), ON_A_CPU),
        (("command.strategy=fsdp",), ON_A_CPU),
        (("command.strategy=fsdp", "image=cuda"), None),
        ((), None),
    ],
)
def test_what_accelerate_ignores_on_a_cpu_is_told(tmp_path: Path, words: tuple, found: Finding | None) -> None:
    gpus = 4 if "image=cuda" in words else 0
    told = [one for one in planned(recipe(tmp_path, *words), gpus_per_node=gpus).findings if "silently" in one.problem]
    assert told == ([found] if found else [])


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.torch
def test_accelerate_ignores_fsdp_on_a_cpu() -> None:
    """The day it no longer does, the finding has to go."""
    seen = subprocess.run(
        [sys.executable, "-c", "import accelerate; print(accelerate.Accelerator().distributed_type.value)"],
        env={
            **os.environ, "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert seen.stdout.split() == ["MULTI_CPU"]


@pytest.mark.torch
class TestItsOwnWords:
    """accelerate itself reads what is written."""

    def test_the_keys(self) -> None:
        from accelerate.commands.config.config_args import ClusterConfig

        assert {*ClusterConfig.__dataclass_fields__, "dynamo_backend"} == accelerate_file.KEYS

    @pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
    def test_its_launcher_takes_the_configuration(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
    ) -> None:
        from accelerate.commands import launch
        from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        made = planned(recipe(tmp_path, f"command.strategy={strategy}", "command.precision=bf16", "image=cuda"))
        (tmp_path / "accelerate.json").write_text(made.files["accelerate.json"])
        filled = {"{node_rank}": "1", "{master}": "10.0.0.1"}
        argv = [filled.get(word, word).replace(made.folder, str(tmp_path)) for word in made.launcher]
        args = launch.launch_command_parser().parse_args([*argv[3:], "t.py"])
        args, _, _ = launch._validate_launch_command(args)
        assert (args.use_deepspeed, args.use_fsdp, args.multi_gpu) == tuple(
            strategy == one for one in ("zero3", "fsdp", "ddp")
        )
        args.deepspeed_fields_from_accelerate_config = ""
        if strategy == "zero3":
            command, env = prepare_deepspeed_cmd_env(args)
            assert command is None  # torch's agent starts the ranks, and no pdsh
        else:
            env = prepare_multi_gpu_env(args)
        assert (args.nnodes, args.nproc_per_node, args.node_rank, args.rdzv_backend) == ("2", "4", 1, "dray")
        wanted = {
            "ddp": {"ACCELERATE_MIXED_PRECISION": "bf16"},
            "fsdp": {
                "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
            },
            "zero3": {
                "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
            },
        }[strategy]  # fmt: skip
        assert {name: env.get(name) for name in wanted} == wanted

    def test_its_options_win_over_its_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the user's own file in place of dray's: ADR 17 rests on this."""
        from accelerate.commands import launch

        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        (tmp_path / "accelerate.json").write_text(
            json.dumps({
                "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 7,
                "num_processes": 56, "machine_rank": 6, "main_process_ip": "10.9.9.9", "main_process_port": 29501,
                "rdzv_backend": "c10d",
            })
        )  # fmt: skip
        made = planned(recipe(tmp_path, "image=cuda"))
        filled = {"{node_rank}": "0", "{master}": "10.0.0.1"}
        argv = [filled.get(word, word).replace(made.folder, str(tmp_path)) for word in made.launcher]
        args, file, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args([*argv[3:], "t.py"]))
        assert file.num_processes == 56
        assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 8, 0)
        assert (args.main_process_ip, args.main_process_port, args.rdzv_backend) == ("10.0.0.1", 0, "dray")
        # What the command line does not have is the file's; so dray writes it there.
        assert (args.gpu_ids, args.mixed_precision) == ("all", "no")

    def test_a_file_for_fsdp1_is_named_with_the_line_that_converts_it(self, tmp_path: Path) -> None:
        from accelerate.commands.to_fsdp2 import to_fsdp2_command, to_fsdp2_command_parser

        with pytest.raises(ConfigError) as refused:
            recipe(tmp_path, file=FSDP1)
        said = refused.value
        line, again = said.details["fix"].splitlines()
        assert str(said) == (
            "the file is for FSDP1, which torch has replaced\n"
            f"  where:  {tmp_path}/my a.yaml: fsdp_config.fsdp_version\n"
            "  wanted: fsdp_version: 2\n"
            "  found:  1; accelerate's default is 1\n"
            f"  fix:    accelerate to-fsdp2 --config_file '{tmp_path}/my a.yaml' "
            f"--output_file '{tmp_path}/my a-fsdp2.yaml'\n"
            "          and accelerate='my a-fsdp2.yaml'"
        )
        to_fsdp2_command(to_fsdp2_command_parser().parse_args(shlex.split(line)[2:]))
        (word,) = shlex.split(again.removeprefix("and "))
        found = recipe(tmp_path, word)
        assert found.command
        assert found.command.strategy == "fsdp"
        assert files(found)["accelerate.json"]["fsdp_config"] == {**FSDP, "fsdp_reshard_after_forward": True}
