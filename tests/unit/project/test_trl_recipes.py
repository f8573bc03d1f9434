"""recipes/trl: TRL's scripts as commands, whose checkpoints go on after a requeue. A stand-in has the part of TRL."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from dray.runs.prepare import read_recipe
from helpers import PYTHON, ROOT, python, until

FOLDER = ROOT / "recipes" / "trl"
STEPS = 300
METHOD = f"""
import sys, time
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Loud(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        print("takes step", state.global_step + 1, flush=True)
        time.sleep(0.01)

class make_parser:
    def parse_args_and_config(self, fail_with_unknown_args):
        folder = sys.argv[sys.argv.index("--output_dir") + 1]
        settings = dict(save_strategy="no", max_steps={STEPS}, report_to=[], use_cpu=True)
        return None, TrainingArguments(folder, **settings), None, None

def main(script_args, training_args, model_args, dataset_args):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
    dataset = [{{"input_ids": list(range(8)), "labels": list(range(8))}}] * 10_000
    trainer = Trainer(model, training_args, train_dataset=dataset, callbacks=[Loud()])
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.end()
"""


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_recipe_runs_the_method_in_the_layer_that_it_names(method: str) -> None:
    recipe = read_recipe(FOLDER / f"{method}.toml")
    assert (recipe.name, recipe.command.argv[:2]) == (method, ("train.py", method))
    assert recipe.max_requeues
    layer = re.search(r"^# (dray image layer .*)$", (FOLDER / f"{method}.toml").read_text(), re.MULTILINE)[1]
    assert layer.startswith(f"dray image layer {recipe.image} --pip trl")
    assert layer.endswith(f"--name {recipe.layer}")


@pytest.mark.torch
@pytest.mark.slow
def test_a_run_saves_when_asked_and_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    scripts = tmp_path / "trl" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "dpo.py").write_text(METHOD)
    (tmp_path / "train.py").write_bytes((FOLDER / "train.py").read_bytes())
    checkpoints = tmp_path / "runs" / "mine" / "checkpoints"

    def attempt(number: int, *, asked: bool) -> tuple[int, list[int]]:
        argv = [python(), "-m", "dray", "run", "--ranks=2", "--run=mine", "image=cpu", "--", "train.py", "dpo"]
        folder = tmp_path / "runs" / "mine" / f"attempt-{number}"
        log = folder / "logs" / "rank-0.log"
        run = subprocess.Popen(argv, cwd=tmp_path, env={**PYTHON, "HOME": str(tmp_path)}, stdout=subprocess.DEVNULL)
        try:
            if asked:
                until(lambda: (log.exists() and log.read_text().count("takes step") > 5) or run.poll() is not None)
                time.sleep(0.2)
                with (folder / "stop").open("a") as stop:
                    stop.write("USR1\n")
            code = run.wait(timeout=120)
        finally:
            run.terminate()
            run.wait()
        return code, [int(step) for step in re.findall(r"takes step (\d+)", log.read_text())]

    code, before = attempt(1, asked=True)
    assert (code, before[0], before[-1] < STEPS) == (75, 1, True)
    (checkpoints / "checkpoint-9999").mkdir()  # of a job that was killed before all ranks had written their parts
    (checkpoints / "checkpoint-9999" / "trainer_state.json").write_text("{}")
    code, after = attempt(2, asked=False)
    assert (code, after[0], after[-1]) == (0, before[-1] + 1, STEPS)
    assert (checkpoints / "model.safetensors").is_file()
