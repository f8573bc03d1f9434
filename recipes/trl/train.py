"""Run TRL's script of a method: save and end with 75 on SIGUSR1, and resume from the newest checkpoint of the run."""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer

CHECKPOINTS = Path(os.environ.get("DRAY_RUN", "."), "checkpoints")
COMPLETE = "complete"
"""An empty file in each checkpoint that all ranks have written: each writes a part, and Trainer waits for none."""
GLOO = []
"""A reference to gloo's process group on CPUs, so that Python never frees it: torch 2.13 may wait for ever in that."""


class SaveOnSignal(TrainerCallback):
    """Dray sends SIGUSR1 before the time ends. All ranks then save after the same step, and end."""

    def __init__(self) -> None:
        self.signalled = self.ends = False
        signal.signal(signal.SIGUSR1, self.handle)

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        """Note the signal until the step has ended."""
        self.signalled = True

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Keep a reference to gloo's group."""
        if distributed.is_initialized() and distributed.get_backend() == "gloo":
            GLOO.append(distributed.group.WORLD)

    def on_step_end(self, args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Save on all ranks after this step if any rank has the signal."""
        signalled = torch.tensor(float(self.signalled), device=args.device)
        if distributed.is_initialized():
            distributed.all_reduce(signalled)
        if signalled:
            self.ends = control.should_save = True

    def on_save(self, _args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Mark the checkpoint as complete. After a signal end, so that dray puts the job back into the queue."""
        if distributed.is_initialized():
            distributed.barrier()  # until all ranks have written their files
        if state.is_world_process_zero:
            (CHECKPOINTS / f"checkpoint-{state.global_step}" / COMPLETE).touch()
        if self.ends:
            if distributed.is_initialized():
                distributed.barrier()  # until the mark is there: dray ends rank 0 when another rank has ended
                distributed.destroy_process_group()
            leave(75)


def newest() -> str | None:
    """Return the newest complete checkpoint."""
    folders = [mark.parent for mark in CHECKPOINTS.glob(f"checkpoint-*/{COMPLETE}")]
    return str(max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))) if folders else None


def leave(code: int) -> NoReturn:
    """Exit; with gloo by os._exit, which skips the interpreter's clean-up."""
    if GLOO:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    trainer.DEFAULT_CALLBACKS.append(SaveOnSignal)
    script = import_module(f"trl.scripts.{sys.argv.pop(1)}")
    sys.argv += ["--output_dir", str(CHECKPOINTS)]
    arguments = script.make_parser().parse_args_and_config(fail_with_unknown_args=False)
    arguments[1].resume_from_checkpoint = newest()
    script.main(*arguments)
    leave(0)
