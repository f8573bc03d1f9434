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
GLOO = []
"""On CPUs the process group, which torch 2.13 may wait forever to free."""


class SaveWhenAsked(TrainerCallback):
    """Dray sends SIGUSR1 before the time ends. All ranks then save after the same step."""

    def __init__(self) -> None:
        self.asked = self.stops = False
        signal.signal(signal.SIGUSR1, self.ask)

    def ask(self, _signal: int, _frame: FrameType | None) -> None:
        """Save after this step."""
        self.asked = True

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Keep gloo's group."""
        if distributed.is_initialized() and distributed.get_backend() == "gloo":
            GLOO.append(distributed.group.WORLD)

    def on_step_end(self, args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Agree on the step."""
        asked = torch.tensor(float(self.asked), device=args.device)
        if distributed.is_initialized():
            distributed.all_reduce(asked)
        if asked:
            self.stops = control.should_save = True

    def on_save(self, *_: object, **__: object) -> None:
        """End, so that dray puts the job back into the queue."""
        if self.stops:
            if distributed.is_initialized():
                distributed.barrier()  # no rank exits before the files are written
                distributed.destroy_process_group()
            leave(75)


def newest() -> str | None:
    """The newest checkpoint that is whole: Trainer writes its state last."""
    states = CHECKPOINTS.glob("checkpoint-*/trainer_state.json")
    folders = [state.parent for state in states]
    return str(max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))) if folders else None


def leave(code: int) -> NoReturn:
    """Exit, with gloo at once: without the interpreter's clean-up."""
    if GLOO:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    trainer.DEFAULT_CALLBACKS.append(SaveWhenAsked)
    script = import_module(f"trl.scripts.{sys.argv.pop(1)}")
    sys.argv += ["--output_dir", str(CHECKPOINTS)]
    arguments = script.make_parser().parse_args_and_config(fail_with_unknown_args=False)
    arguments[1].resume_from_checkpoint = newest()
    script.main(*arguments)
    leave(0)
