"""dray beside the ways that people come from, each recipe's tiny form in turn with its tutorial's, on this machine.

    .venv/bin/python benchmarks/seeds [ROUNDS [STEPS [RECIPE...]]]   STEPS: a multiple of 10
    .venv/bin/python benchmarks/seeds scaling [ROUNDS]         the scaling table of ULHPC's tutorial: 1, 2 and 4 ranks

It wants Docker with the image dray:cpu, in which both sides run: a container of two cores for each training, two ranks
in it, the tutorial's launcher, model, batch, steps, precision, evaluations and checkpoints on both sides.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from dray.config.recipe import Recipe
from dray.runs.prepare import read_recipe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEEDS = {
    "bert-mlm-analog": "aihwkit-lightning",
    "gpt2-wikitext-ddp": "hf-slurm-training",
    "opt125m-yelp": "ULHPC's DeepSpeed tutorial",
    "gpt2-micro-owt": "mistral",
    "gpt-neo-imdb": "the accelerate example for LUMI",
}
RANKS = 2
JOINED = {"gpt2-wikitext-ddp", "gpt2-micro-owt"}  # whose tutorials join texts and cut them
# As the tutorials' DeepSpeed files have it.
STAGES: dict[str, dict[str, Any]] = {
    "zero2": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True},
    "zero3": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
}
# MULTI_GPU also on CPUs: any other kind starts one process and says nothing.
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: 'no'\n"
LAUNCH = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--config_file={config}", "--num_machines=1"),
        f"--num_processes={RANKS}",
    ],
    "deepspeed": [
        *("-m", "deepspeed.launcher.runner", "--hostfile={hostfile}", "--no_ssh", "--node_rank=0", "--no_local_rank"),
        "--master_addr=127.0.0.1",
    ],
}


class Bench:
    """A folder that containers see, with what both sides read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        (folder / "accelerate.yaml").write_text(ACCELERATE)
        (folder / "hostfile").write_text(f"localhost slots={RANKS}\n")
        made = (
            "import json, sys; from dray.train.data import synthetic_corpus\n"
            "rows = [json.dumps({'text': text}) + '\\n' for text in synthetic_corpus.documents()]\n"
            "border = len(rows) - len(rows) // 20\n"
            "open(sys.argv[1] + '/text.jsonl', 'w').writelines(rows[:border])\n"
            "open(sys.argv[1] + '/validation.jsonl', 'w').writelines(rows[border:])\n"
        )
        self.inside(["python3", "-c", made, str(folder)])
        self.recipes = folder / "recipes"  # less what the other side does not do here: passes, and more evaluations
        shutil.copytree(ROOT / "recipes", self.recipes)
        for recipe in self.recipes.glob("*.toml"):
            text = re.sub(r"^\[(tiny\.)?evaluate\..*\n((?!\[).*\n)*", "", recipe.read_text(), flags=re.MULTILINE)
            text = re.sub(r"^(epochs|attention_stats|at_start) = .*\n", "", text, flags=re.MULTILINE)
            recipe.write_text(re.sub(r"^every = \[\[4.*", "every = 4", text, flags=re.MULTILINE))

    def inside(self, argv: list[str]) -> tuple[float, float]:
        """When it began, and how many seconds it took, the container's start included."""
        began = time.time()
        env = {"BEGAN": str(began), "DRAY_HOME": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        seen = [
            "-v",
            f"{ROOT}:{ROOT}:ro",
            "-v",
            f"{self.folder}:{self.folder}",
            "--ipc=host",
            "--network=none",
            "--hostname=bench",
            "--add-host=bench:127.0.0.1",
        ]
        said = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        command = ["docker", "run", "--rm", "--init", *seen, *said, "--workdir", str(ROOT), "dray:cpu", *argv]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own
        if done.returncode:
            sys.exit(f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return began, time.time() - began

    def words(self, steps: int) -> list[str]:
        """What is other than in the tiny form: a text that both sides read, and more steps."""
        return [
            "scale=tiny", f"train.steps={steps}", "train.warmup_steps=2", "train.log_every=5", "train.eval_every=10",
            f"data.train={self.folder}/text.jsonl", f"data.validation={self.folder}/validation.jsonl", "data.test=",
            "data.max_eval_samples=24", "nodes=1", f"ranks_per_node={RANKS}",
        ]  # fmt: skip

    def ours(self, name: str, steps: int, *more: str) -> dict[str, Any]:
        """`dray run`."""
        self.count += 1
        runs = self.folder / f"ours-{self.count}"
        cache = f"data.cache_dir={self.folder}/cold-{self.count}"
        argv = ["python3", "-m", "dray", "run", f"{self.recipes}/{name}.toml", *self.words(steps), cache, *more]
        began, seconds = self.inside([*argv, "--runs", str(runs)])
        (folder,) = runs.iterdir()
        lines = [json.loads(line) for line in (folder / "attempt-1" / "metrics.jsonl").read_text().splitlines()]
        taken = [line for line in lines if line["event"] == "step"]
        between = (taken[-1]["tokens"] - taken[0]["tokens"]) / (taken[-1]["time"] - taken[0]["time"])
        return {
            "seconds": seconds,
            "lines": lines,
            "speed": between,  # from the first step's end to the last's, as on the other side
            "first": taken[0]["time"] - began,
            "final": folder / "checkpoints" / "final",
            "precision": json.loads((folder / "attempt-1" / "plan.json").read_text())["recipe"]["train"]["precision"],
            "evaluation": [line["loss"] for line in lines if line["event"] == "eval"][-1],
        }

    def theirs(self, name: str, steps: int, ours: dict[str, Any]) -> dict[str, Any]:
        """The tutorial's launcher and transformers' Trainer; with model, tokenizer and precision of our run."""
        self.count += 1
        out = self.folder / f"theirs-{self.count}"
        out.mkdir()
        recipe = read_recipe(self.recipes / f"{name}.toml", self.words(steps))
        assert recipe.train is not None
        (out / "settings.json").write_text(json.dumps(self._settings(name, recipe, ours, out)))
        places = {"config": f"{self.folder}/accelerate.yaml", "hostfile": f"{self.folder}/hostfile"}
        launch = [word.format(**places) for word in LAUNCH[recipe.launcher]]
        _, seconds = self.inside(["python3", *launch, str(HERE / "theirs.py"), str(out / "settings.json")])
        found = json.loads((out / "found.json").read_text())
        assert recipe.batch is not None
        each = statistics.mean(after - before for before, after in pairwise(found["ends"]))
        tokens = recipe.batch.global_size * recipe.data.sequence_length
        return {**found, "seconds": seconds, "speed": tokens / each, "first": found["ends"][0]}

    def _settings(self, name: str, recipe: Recipe, ours: dict[str, Any], out: Path) -> dict[str, Any]:
        train, batch, final = recipe.train, recipe.batch, ours["final"]
        assert train is not None
        assert batch is not None
        per_device = batch.per_device or batch.global_size // RANKS
        saved = json.loads((final / "config.json").read_text())
        kept = {key: saved[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        deepspeed = None
        if train.strategy in STAGES:
            stage = dict(STAGES[train.strategy])
            for part, wanted in (("optimizer", bool(train.offload)), ("param", train.offload == "all")):
                if wanted:
                    stage[f"offload_{part}"] = {"device": "cpu"}
            deepspeed = {
                "zero_optimization": stage, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
                "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto", "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            }  # fmt: skip
        return {
            "type": recipe.model.type, "config": {**kept, **recipe.model.config}, "tokenizer": str(final),
            "text": recipe.data.train, "validation": recipe.data.validation, "block": recipe.data.sequence_length,
            "joined": name in JOINED, "per_device": per_device, "evaluated": recipe.data.max_eval_samples,
            "accumulation": batch.global_size // (per_device * RANKS), "steps": train.steps, "lr": train.lr,
            "schedule": train.lr_scheduler_type, "warmup": train.warmup_steps, "log_every": train.log_every,
            "eval_every": train.eval_every,
            "save_every": recipe.checkpoint.every[-1][1] if recipe.checkpoint.every else 0,
            "seed": train.seed, "bf16": ours["precision"] == "bf16", "recompute": train.activation_checkpointing,
            "objective": train.objective, "deepspeed": deepspeed, "report_to": ["tensorboard"],
            "analog": recipe.analog.model_dump() if recipe.analog else None, "out": str(out),
        }  # fmt: skip


def main(rounds: int = 3, steps: int = 40, *names: str) -> None:
    """Each in turn, so that a slow minute of the machine is both sides', and each is first in every other round."""
    with tempfile.TemporaryDirectory(prefix="dray-seeds-") as made:
        bench = Bench(Path(made))
        print(f"{RANKS} ranks, {steps} steps, median of {rounds} rounds in turn, {os.cpu_count()} cores\n")
        print("| recipe | beside | start to end, s: theirs, ours | ratio | tokens/s: theirs, ours | ratio | "
              "first step, s: theirs, ours | evaluation loss: theirs, ours |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|", flush=True)
        chosen = {name: SEEDS[name] for name in names} or SEEDS
        for name, page in chosen.items():
            pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
            for turn in range(rounds):
                if turn % 2:
                    theirs = bench.theirs(name, steps, pairs[-1][1])
                    pairs.append((theirs, bench.ours(name, steps)))
                else:
                    ours = bench.ours(name, steps)
                    pairs.append((bench.theirs(name, steps, ours), ours))
            shown = {
                key: tuple(statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
                for key in ("seconds", "speed", "first", "evaluation")
            }
            row = [
                name, page,
                "{:.1f}, {:.1f}".format(*shown["seconds"]),
                _spread([theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]),
                "{:,.0f}, {:,.0f}".format(*shown["speed"]),
                _spread([ours["speed"] / theirs["speed"] for theirs, ours in pairs]),
                "{:.1f}, {:.1f}".format(*shown["first"]), "{:.3f}, {:.3f}".format(*shown["evaluation"]),
            ]  # fmt: skip
            print(f"| {' | '.join(row)} |", flush=True)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def scaling(rounds: int = 3) -> None:
    """Three passes of the OPT recipe on 1, 2 and 4 ranks, without dropout, in 32 bits: the same losses in each round.

    A rank computes on one core, as it would on one GPU; four have two cores between them.
    """
    with tempfile.TemporaryDirectory(prefix="dray-seeds-") as made:
        bench = Bench(Path(made))
        seen: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
        wide = {"hidden_size": 256, "ffn_dim": 1024, "word_embed_proj_dim": 256, "num_hidden_layers": 4,
                "num_attention_heads": 4, "max_position_embeddings": 128, "dropout": 0.0}  # fmt: skip
        for _ in range(rounds):
            for ranks, runs in seen.items():
                words = [f"model.config.{key}={value}" for key, value in wide.items()]
                words += [f"ranks_per_node={ranks}", f"batch.per_device={16 // ranks}", "batch.global_size=16"]
                words += [
                    "data.sequence_length=128",
                    "data.max_train_samples=320",
                    "train.eval_every=20",
                    "train.precision=fp32",
                ]
                words += ["train.log_every=20", "env.OMP_NUM_THREADS=1"]
                runs.append(bench.ours("opt125m-yelp", 60, *words))
        base = statistics.median(run["lines"][-1]["train_seconds"] for run in seen[1])
        print("| ranks | s of training | evaluation loss after each pass | speed-up | efficiency |")
        print("|---|---|---|---|---|")
        for ranks, runs in seen.items():
            seconds = statistics.median(run["lines"][-1]["train_seconds"] for run in runs)
            found = {tuple(line["loss"] for line in run["lines"] if line["event"] == "eval") for run in runs}
            losses = " or ".join("/".join(f"{loss:.5f}" for loss in each) for each in found)
            print(f"| {ranks} | {seconds:.1f} | {losses} | {base / seconds:.2f} | {base / seconds / ranks:.0%} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["scaling"]:
        scaling(*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:3]), *sys.argv[3:])
