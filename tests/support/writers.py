"""Checkpoints as other programs write them: `python writers.py trainer|zero FOLDER`. Beside each is truth.safetensors,
the weights and averages by the names that the model has for them, as the program itself has them in memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, RANKS = 3, 3
# As trainings.GPT has it, with a token for each byte.
CONFIG = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=257, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=256, eos_token_id=256,
)  # fmt: skip


def network() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(CONFIG)


def truth(folder: Path, net: GPT2LMHeadModel, state) -> None:
    """`state` gives what the optimizer has of a weight: its name, or `weights`."""
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    named = {f"{kind}.{name}": state(weight, kind) for name, weight in net.named_parameters() for kind in kinds}
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(
            {name: one.detach().clone().contiguous() for name, one in named.items()}, folder / "truth.safetensors"
        )


def rows(seed: int, count: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (count, 16), generator=torch.Generator().manual_seed(seed))


def trainer(folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import Trainer, TrainingArguments

    net = network()
    arguments = TrainingArguments(
        output_dir=folder / "trainer", max_steps=STEPS, save_steps=STEPS, per_device_train_batch_size=2,
        weight_decay=0.1, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    samples = [{"input_ids": row, "labels": row} for row in rows(1, 16)]
    done = Trainer(model=net, args=arguments, train_dataset=samples)
    done.train()
    averages = done.optimizer.optimizer.state if hasattr(done.optimizer, "optimizer") else done.optimizer.state
    truth(folder, net, lambda weight, kind: weight if kind == "weights" else averages[weight][kind])
    net.save_pretrained(folder / "sharded", max_shard_size="40KB")
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    torch.save(
        {"model": {f"module.{name}": one for name, one in net.state_dict().items()}, "epoch": 3}, folder / "x.pt"
    )
    torch.save(net.state_dict(), folder / "old.bin", _use_new_zipfile_serialization=False)
    torch.save({"model": net.state_dict(), "path": Path("x"), "args": arguments}, folder / "args.pt")

    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(STEPS):
        net(input_ids=rows(step), labels=rows(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model, state = get_state_dict(net, optimizer)
    dcp.save({"app": {"model": model, "optimizer": state}, "epoch": 3}, checkpoint_id=folder / "dcp" / "step_3")
    truth(folder / "dcp", net, lambda weight, kind: weight if kind == "weights" else optimizer.state[weight][kind])


def zero_rank(rank: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["WRITERS_PORT"],
    }  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo", verbose=False)
    for stage in (1, 2, 3):
        net = network()
        matrices, others = ([one for one in net.parameters() if (one.dim() > 1) == big] for big in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        engine = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(groups, lr=1e-3),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )[0]
        for step in range(STEPS):
            row = rows(step * RANKS + rank, 1)
            engine.backward(engine(input_ids=row, labels=row).loss)
            engine.step()
        made = folder / f"zero{stage}"
        engine.save_checkpoint(made)
        if stage < 3:  # 0.19.8 links all groups once the first was updated, and the others have no averages then
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()

        def state(weight, kind):
            return (
                safe_get_full_fp32_param(weight) if kind == "weights" else safe_get_full_optimizer_state(weight, kind)
            )

        truth(made, engine.module, state)
        CONFIG.architectures = ["GPT2LMHeadModel"]
        if rank == 0:
            CONFIG.save_pretrained(made)
        dist.barrier()
    os._exit(0)


def zero(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["WRITERS_PORT"] = str(free.getsockname()[1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  once, before the ranks are forked

    torch.multiprocessing.start_processes(zero_rank, (folder,), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    {"trainer": trainer, "zero": zero}[sys.argv[1]](Path(sys.argv[2]))
