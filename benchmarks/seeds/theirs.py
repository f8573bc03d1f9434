"""The way of the tutorials that people come from: transformers' Trainer, as each of them sets it.

    LAUNCHER theirs.py SETTINGS.json

Written anew from what those pages say. Rank 0 writes found.json: when steps ended, the losses, the last evaluation.
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
from accelerate import DistributedType, PartialState  # noqa: E402
from datasets import Dataset, load_dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    training_args,
)


class Clock(TrainerCallback):
    """When steps ended; and what an analog model wants after each."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.layers: list[Any] = []

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        for layer in self.layers:
            layer.clip_weights()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.time() - BEGAN)


def blocks(text: str, tokenizer: Any, said: dict[str, Any]) -> Dataset:  # noqa: ANN401
    """Joined and cut, as run_clm does it; or each text cut and filled up by itself."""
    raw = load_dataset("json", data_files=text, split="train", cache_dir=said["out"])
    if not said["joined"]:
        options = {"truncation": True, "padding": "max_length", "max_length": said["block"]}
        return raw.map(lambda rows: tokenizer(rows["text"], **options), batched=True, remove_columns=raw.column_names)

    def grouped(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*row)) for name, row in rows.items()}
        length = len(joined["input_ids"]) // said["block"] * said["block"]
        return {
            name: [row[at : at + said["block"]] for at in range(0, length, said["block"])]
            for name, row in joined.items()
        }

    tokens = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=raw.column_names)
    return tokens.map(grouped, batched=True)


def analog(model: Any, said: dict[str, Any], clock: Clock) -> Any:  # noqa: ANN401
    """Linear layers become analog, and are clipped after each step, in the model alone."""
    from aihwkit_lightning.nn import AnalogLinear  # noqa: PLC0415  one of the five
    from aihwkit_lightning.nn.conversion import convert_to_analog  # noqa: PLC0415  one of the five
    from aihwkit_lightning.simulator.configs import TorchInferenceRPUConfig  # noqa: PLC0415  one of the five
    from aihwkit_lightning.simulator.parameters import WeightClipType, WeightNoiseInjectionType  # noqa: PLC0415  one of the five

    config = TorchInferenceRPUConfig()
    config.forward.inp_res = said["forward_inp_res"]
    config.clip.type, config.clip.sigma = WeightClipType.LAYER_GAUSSIAN, said["clip_sigma"]
    config.modifier.noise_type = WeightNoiseInjectionType.ADD_NORMAL
    config.modifier.std_dev = said["modifier_std_dev"]
    ranges = config.pre_post.input_range
    ranges.enable, ranges.init_from_data = True, said["input_range_init_from_data"]
    model = convert_to_analog(model, config, ensure_analog_root=False)
    clock.layers = [layer for layer in model.modules() if isinstance(layer, AnalogLinear)]
    return model


def main() -> None:
    """Train, evaluate, save."""
    said = json.loads(Path(sys.argv[1]).read_text())
    if said["deepspeed"]:
        # With a word of CPUs the DeepSpeed file is passed over, in silence; without it there must be a GPU.
        os.environ.pop("ACCELERATE_USE_CPU", None)
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
        training_args.is_torch_bf16_gpu_available = lambda: True
    tokenizer = AutoTokenizer.from_pretrained(said["tokenizer"])
    clock, masked = Clock(), said["objective"] == "masked"
    arguments = TrainingArguments(
        output_dir=said["out"], per_device_train_batch_size=said["per_device"],
        per_device_eval_batch_size=said["per_device"], gradient_accumulation_steps=said["accumulation"],
        max_steps=said["steps"], learning_rate=said["lr"], lr_scheduler_type=said["schedule"],
        warmup_steps=said["warmup"], logging_steps=said["log_every"], seed=said["seed"], bf16=said["bf16"],
        eval_strategy="steps" if said["eval_every"] else "no", eval_steps=said["eval_every"] or None,
        save_strategy="steps" if said["save_every"] else "no", save_steps=said["save_every"] or 500,
        save_total_limit=2, gradient_checkpointing=said["recompute"], report_to=said["report_to"],
        deepspeed=said["deepspeed"], disable_tqdm=True, use_cpu=not said["deepspeed"],
        ddp_find_unused_parameters=bool(said["analog"]),
    )  # fmt: skip
    torch.manual_seed(said["seed"])
    made = AutoConfig.for_model(said["type"], **said["config"])
    model = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(made)
    if said["analog"]:
        model = analog(model, said["analog"], clock)
    evaluated = blocks(said["validation"], tokenizer, said)
    trainer = Trainer(
        model=model, args=arguments, callbacks=[clock], processing_class=tokenizer,
        train_dataset=blocks(said["text"], tokenizer, said),
        eval_dataset=evaluated.select(range(min(said["evaluated"], len(evaluated)))),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=masked, mlm_probability=0.15),
    )  # fmt: skip
    if masked:  # Trainer leaves the division by num_items_in_batch to the model; BERT takes the argument and ignores it
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    trainer.save_model(str(Path(said["out"], "final")))
    if trainer.is_world_process_zero():
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        evaluations = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        found = {"ends": clock.ends, "losses": [float(loss) for loss in losses], "evaluation": float(evaluations[-1])}
        Path(said["out"], "found.json").write_text(json.dumps(found))


main()
