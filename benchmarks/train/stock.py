"""What people run today: transformers' Trainer on texts that `datasets` has tokenised and grouped, one process.

    python stock.py SETTINGS.json

The way of transformers' causal language-modelling example, written anew: the same calls with the same defaults. Prints
a JSON object: when each step ended, and the losses.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

BEGAN = float(os.environ.get("BEGAN", time.time()))

import torch  # noqa: E402
from datasets import Dataset, load_dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)


class Clock(TrainerCallback):
    """When steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.time() - BEGAN)


class Save(TrainerCallback):
    """Weights and optimizer by torch.save, while all else waits: the least that a checkpoint written at once takes."""

    def __init__(self, every: int, file: Path, held: list[float]) -> None:
        self.every, self.file, self.held = every, file, held

    def on_step_end(self, _: object, state: TrainerState, __: object, **more: Any) -> None:  # noqa: ANN401
        if state.global_step % self.every == 0:
            began = time.perf_counter()
            torch.save([more["model"].state_dict(), more["optimizer"].state_dict()], self.file)
            with self.file.open("rb") as written:
                os.fsync(written.fileno())
            self.held.append(time.perf_counter() - began)


class Timed(Trainer):
    """How long each of its own checkpoints takes, in which the loop waits."""

    held: list[float]

    def _save_checkpoint(self, *words: Any, **more: Any) -> None:  # noqa: ANN401
        began = time.perf_counter()
        super()._save_checkpoint(*words, **more)
        self.held.append(time.perf_counter() - began)


def blocks(text: str, tokenizer: AutoTokenizer, block: int, cache: str, end: str) -> Dataset:
    """Tokenised line by line, joined by thousands, cut; what is left over of each thousand is dropped."""

    def grouped(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*rows)) for name, rows in examples.items()}
        length = len(joined["input_ids"]) // block * block
        cut = {name: [row[at : at + block] for at in range(0, length, block)] for name, row in joined.items()}
        cut["labels"] = cut["input_ids"].copy()
        return cut

    raw = load_dataset("text", data_files={"train": text}, cache_dir=cache, split="train")
    if end:
        raw = raw.filter(lambda row: bool(row["text"].strip()))
        raw = raw.map(lambda row: {"text": row["text"] + end})
    tokens = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
    return tokens.map(grouped, batched=True)


def main() -> None:
    """Train as the settings say."""
    said = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(said["tokenizer"])
    # People have no end of text, and blank lines. Where losses are held against one another, both sides have one text.
    end = tokenizer.eos_token if said.get("ends") else ""
    data = blocks(said["text"], tokenizer, said["block"], said["cache"], end)
    if said.get("only_tokens"):
        print(json.dumps({"tokens": len(data) * said["block"], "seconds": time.time() - BEGAN}))
        return
    torch.manual_seed(said["seed"])
    model, collator = GPT2LMHeadModel, default_data_collator
    configuration = GPT2Config
    if said.get("masked"):
        model, configuration = BertForMaskedLM, BertConfig
        data = data.remove_columns("labels")
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    clock, held = Clock(), list[float]()
    arguments = TrainingArguments(
        output_dir=said["out"], per_device_train_batch_size=said["batch"], max_steps=said["steps"],
        learning_rate=said["lr"], logging_steps=1, seed=said["seed"],
        report_to=[], disable_tqdm=True, use_cpu=True, **{"save_strategy": "no", **said["switches"]},
    )  # fmt: skip
    trainer = Timed(
        model=model(configuration(**said["model"])), args=arguments, train_dataset=data, data_collator=collator,
        callbacks=[clock, *([Save(every, Path(said["out"], "saved.pt"), held)] if (every := said.get("save")) else [])],
    )  # fmt: skip
    trainer.held = held
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(json.dumps({"ends": clock.ends, "losses": [float(loss) for loss in losses], "held": held}))


main()
