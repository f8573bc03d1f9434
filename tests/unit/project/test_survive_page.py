"""The scripts of docs/survive.md save when they are asked, end with 75, and go on in the next attempt."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from helpers import PYTHON, ROOT, python, until

LOOP, TRAINER, _ = re.findall("```python\n(.*?)```", (ROOT / "docs" / "survive.md").read_text(), re.DOTALL)
STEPS = 100_000
OWN = f"""
import pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
device, steps, save_every = torch.device("cpu"), {STEPS}, 50
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())

def train_one_step(step):
    print("takes step", step, flush=True)
    time.sleep(0.01)
"""
MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
dataset = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 100_000
"""
LOUD = """
class Loud(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        print("takes step", state.global_step + 1, flush=True)

"""


def attempt(folder: Path, number: int) -> list[int]:
    """The steps that rank 0 has taken in this attempt, which is asked to save after some of them."""
    argv = [python(), "-m", "dray", "run", "--ranks=2", "--run=mine", "image=cpu", "--", "train.py"]
    log = folder / "runs" / "mine" / f"attempt-{number}"
    with (folder / f"out-{number}").open("w+") as out:
        run = subprocess.Popen(argv, cwd=folder, env={**PYTHON, "HOME": str(folder)}, stdout=out, stderr=out)
        rank = log / "logs" / "rank-0.log"
        until(lambda: (rank.exists() and rank.read_text().count("takes step") > 5) or run.poll() is not None)
        time.sleep(0.2)
        if run.poll() is None:
            with (log / "stop").open("a") as stop:
                stop.write("USR1\n")
        try:
            assert run.wait(timeout=120) == 75, (folder / f"out-{number}").read_text()
        finally:
            run.terminate()
            run.wait()
    return [int(step) for step in re.findall(r"takes step (\d+)", rank.read_text())]


def script(block: str) -> str:
    if block == "loop":
        return OWN + LOOP
    arguments = "TrainingArguments(folder, "
    assert arguments in TRAINER
    program = MODEL + TRAINER.replace(arguments, f"{arguments}report_to=[], use_cpu=True, ")
    return program.replace("callback, folder =", f"{LOUD}callback, folder =").replace(
        "[callback]", "[Loud(), callback]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", ["loop", "trainer"])
def test_it_saves_and_the_next_attempt_goes_on(tmp_path: Path, block: str) -> None:
    (tmp_path / "train.py").write_text(script(block))
    before, after = attempt(tmp_path, 1), attempt(tmp_path, 2)
    assert before[0] == 1
    assert after[0] == before[-1] + 1
