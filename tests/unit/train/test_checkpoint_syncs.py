"""No step waits for a checkpoint: what is asked of CUDA's streams, in order and by which thread, in whole runs.

CUDA's interface is a stand-in that writes down each call; everything else is the trainer as it is.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from trainings import Forks, Run

pytestmark = pytest.mark.torch
STAND_IN = """
import json, os, threading
from contextlib import contextmanager
import torch

active = pinned = None

def note(*what):
    thread = "loop" if threading.current_thread() is threading.main_thread() else "writer"
    with open(os.environ["EVENTS"] + os.environ["RANK"], "a") as file:
        file.write(json.dumps([thread, *what]) + "\\n")

class Stream:
    def __init__(self, device="", name="copies"):
        self.name = name
    def wait_stream(self, other):
        note(self.name, "waits for", other.name)
    def wait_event(self, event):
        note(self.name, "waits for", event.of)
    def synchronize(self):
        note("waits for", self.name)

class Event:
    def __init__(self, **options):
        self.of = ""
    def record(self, stream):
        self.of = "the end of " + stream.name
        note("marks", self.of)
    def synchronize(self):
        note("waits for", self.of)

@contextmanager
def on(stream):
    global active
    active = stream
    yield
    active = None

training = Stream(name="training")
torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, on
torch.cuda.current_stream = lambda device=None: training
torch.cuda.synchronize = lambda *device: note("waits for", "the device")
copy = torch.Tensor.copy_

class Cudart:
    def cudaHostRegister(self, address, size, flags):
        global pinned
        pinned = range(address, address + size)
        note("pins a buffer")
        return 0
    def cudaHostUnregister(self, address):
        note("unpins a buffer")
        return 0

torch.cuda.cudart = Cudart

def copied(self, source, non_blocking=False):
    if pinned and self.data_ptr() in pinned:
        note("copies", "non_blocking" if non_blocking else "blocking", "on " + (active.name if active else "training"))
    return copy(self, source, non_blocking)

torch.Tensor.copy_ = copied

from dray.train.checkpoint import checkpoints as checkpoint, staging
from dray.train.parallel import ddp
checkpoint.Staging = lambda device: staging.Staging(torch.device("cuda"))
updated = ddp.Ddp.update

def update(self, lr):
    note("updates the weights")
    return updated(self, lr)

ddp.Ddp.update = update
"""
SAVE = [
    ["copies", "waits for", "training"],
    ["copies", "non_blocking", "on copies"],
    ["marks", "the end of copies"],
]  # fmt: skip
UPDATE, FENCE = ["updates the weights"], ["training", "waits for", "the end of copies"]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("ddp", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        ("fsdp", 2),
    ],
)
def test_copies_go_beside_the_training_and_only_the_writer_waits_for_them(
    forks: Forks, tmp_path: Path, strategy: str, ranks: int
) -> None:
    run = Run(
        forks, tmp_path / "run", ranks, f"train.strategy={strategy}", "checkpoint.every=[[0, 2]]", steps="steps=5",
        before=STAND_IN,
    )  # fmt: skip
    run.end(EVENTS=str(tmp_path / "events"))
    assert len(list((run.folder / "checkpoints").glob("step-*"))) == 2
    for rank in range(ranks):
        events = [json.loads(line) for line in (tmp_path / f"events{rank}").read_text().splitlines()]
        loop = [event for event, _ in groupby(what for thread, *what in events if thread == "loop")]
        # The fence comes right before the next update: forward and backward passes run beside the copies.
        assert loop == [
            ["pins a buffer"], UPDATE, *SAVE, FENCE, UPDATE, *SAVE, FENCE, UPDATE, ["unpins a buffer"],
        ]  # fmt: skip
        writer = [what for thread, *what in events if thread == "writer"]
        assert writer == [["waits for", "the end of copies"]] * 2
