"""dray's trainer beside the one that people use, in turn, on this machine.

    .venv/bin/python benchmarks/train speed [ROUNDS [STEPS]]     tokens a second, and the losses beside them
    .venv/bin/python benchmarks/train masked [ROUNDS [STEPS]]    the same for BERT, which predicts 15 % of the tokens
    .venv/bin/python benchmarks/train tokens [MEGABYTES]         text into tokens, and the memory that it takes
    .venv/bin/python benchmarks/train stream [ROUNDS [STEPS]]    text into tokens while training, by one core and by all
    .venv/bin/python benchmarks/train start [ROUNDS]             from a process's start to its first step's end
    .venv/bin/python benchmarks/train checkpoint [ROUNDS]        what a step is held up by a checkpoint

It wants what `make demo` installs, and `datasets` for the other side. The text is this Python's own source code; both
sides have the same tokenizer, model, batch and learning rate.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

STOCK = Path(__file__).with_name("stock.py")
VOCABULARY, BLOCK, BATCH, RATE = 8192, 256, 8, 5e-4
GPT2 = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": BLOCK}
RECIPE = f"""
name = "bench"
launcher = "python"
[batch]
global_size = {BATCH}
[data]
sequence_length = {BLOCK}
[train]
lr = {RATE}
lr_scheduler_type = "linear"
log_every = 1
"""
BERT = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
    "max_position_embeddings": BLOCK,
}  # fmt: skip
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


class Bench:
    """A folder with a text, a tokenizer and what the runs leave."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.text, self.tokenizer = folder, folder / "text.txt", folder / "tokenizer"
        _write_text(self.text, megabytes)
        made = ByteLevelBPETokenizer()
        special = {"eos_token": "<end>", "bos_token": "<end>", "pad_token": "<pad>", "mask_token": "<mask>"}
        made.train([str(self.text)], VOCABULARY, special_tokens=sorted({*special.values()}), show_progress=False)
        fast = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **special)
        fast.save_pretrained(self.tokenizer)
        (folder / "bench.toml").write_text(RECIPE)
        self.count = 0

    def stock(
        self,
        steps: int,
        seed: int,
        switches: dict[str, Any],
        model: dict[str, Any],
        *,
        cold: bool = False,
        **more: int,
    ) -> dict:
        """One training of the other side."""
        cache = self.folder / ("cold" if cold else "stock-cache")
        shutil.rmtree(self.folder / "cold", ignore_errors=True)
        said = {
            "text": str(self.text), "tokenizer": str(self.tokenizer), "block": BLOCK, "cache": str(cache),
            "steps": steps, "seed": seed, "batch": BATCH, "lr": RATE, "switches": switches,
            "out": str(self.folder / "out"), **more,
            "model": {**(BERT if more.get("masked") else GPT2), "vocab_size": VOCABULARY, **model},
        }  # fmt: skip
        settings = self.folder / "stock.json"
        settings.write_text(json.dumps(said))
        return json.loads(self._run([sys.executable, str(STOCK), str(settings)])[1].splitlines()[-1])

    def dray(self, steps: int, seed: int, *words: str, ranks: int = 1, cold: bool = False) -> dict:
        """One training of ours, as a user starts it."""
        self.count += 1
        name, cache = f"run-{self.count}", self.folder / ("cold" if cold else "tokens")
        shutil.rmtree(self.folder / "cold", ignore_errors=True)
        kind, model = ("bert", BERT) if "train.objective=masked" in words else ("gpt2", GPT2)
        said = [
            f"model.type={kind}", *(f"model.config.{key}={value}" for key, value in model.items()),
            f"train.steps={steps}", f"train.seed={seed}", f"ranks_per_node={ranks}",
            f"batch.per_device={BATCH // ranks}", f"data.train={self.text}", f"data.cache_dir={cache}",
            f"model.tokenizer={self.tokenizer}", "data.max_eval_samples=8", *words,
        ]  # fmt: skip
        argv = [sys.executable, "-m", "dray", "run", str(self.folder / "bench.toml"), *said]
        began, _ = self._run([*argv, "--nodes", "1", "--runs", str(self.folder / name)])
        lines = [
            json.loads(line)
            for line in next((self.folder / name).glob("*/attempt-1/metrics.jsonl")).read_text().splitlines()
        ]
        found = [line for line in lines if line["event"] == "step"]
        return {
            "ends": [line["time"] - began for line in found],
            "losses": [line["loss"] for line in found],
            "lines": found,
        }

    def _run(self, argv: list[str]) -> tuple[float, str]:
        began = time.time()
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "BEGAN": str(began)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)  # noqa: S603  our own
        if done.returncode:
            sys.exit(f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return began, done.stdout


def _write_text(path: Path, megabytes: int) -> None:
    """Source code, a file after another, as often as it takes."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    size = 0
    with path.open("wb") as out:
        while size < megabytes * 1_000_000:
            for source in sources:
                if "site-packages" in source.parts:
                    continue
                try:
                    text = source.read_text(encoding="utf-8").encode()
                except UnicodeDecodeError:
                    continue
                size += out.write(text)
                if size >= megabytes * 1_000_000:
                    return


def speed(rounds: int = 3, steps: int = 60) -> None:
    """Tokens a second in the middle step, compilation left out; the losses of the last ten; each round has a seed."""
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(Path(made), 12)
        half = _precision()
        every = {"bf16": half == "bf16", "torch_compile": True}
        compiled = ("train.compile=true", f"train.precision={half}")
        without = [f"model.config.{name}=0.0" for name in DROPOUT]
        ways: dict[str, Any] = {
            "Trainer, its defaults (fp32, dropout 0.1)": lambda seed: bench.stock(steps, seed, {}, {}, ends=True),
            f"Trainer, {half} and compiled, dropout 0.1": lambda seed: bench.stock(steps, seed, every, {}, ends=True),
            f"Trainer, {half} and compiled, dropout 0": lambda seed: bench.stock(
                steps, seed, every, DROPOUT, ends=True
            ),
            "dray, fp32, dropout 0.1, 1 rank": lambda seed: bench.dray(steps, seed, "train.precision=fp32"),
            f"dray, {half} and compiled, dropout 0.1, 1 rank": lambda seed: bench.dray(steps, seed, *compiled),
            f"dray, {half} and compiled, dropout 0.1, 2 ranks": lambda seed: bench.dray(
                steps, seed, *compiled, ranks=2
            ),
            f"dray, {half} and compiled, dropout 0, 1 rank": lambda seed: bench.dray(steps, seed, *compiled, *without),
            f"dray, {half} and compiled, dropout 0, 2 ranks": lambda seed: bench.dray(
                steps, seed, *compiled, *without, ranks=2
            ),
        }
        _compare("GPT-2", ways, rounds, steps)


def masked(rounds: int = 3, steps: int = 60) -> None:
    """Of BERT; most of what its head computes is thrown away, or left out."""
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(Path(made), 12)
        words = ("train.objective=masked", "train.precision=fp32")
        ways: dict[str, Any] = {
            "Trainer, its defaults (fp32, dropout 0.1)": lambda seed: bench.stock(
                steps, seed, {}, {}, ends=True, masked=True
            ),
            "dray, fp32, dropout 0.1, 1 rank": lambda seed: bench.dray(steps, seed, *words),
            "dray, fp32, dropout 0.1, 2 ranks": lambda seed: bench.dray(steps, seed, *words, ranks=2),
        }
        _compare("BERT", ways, rounds, steps)


def _precision() -> str:
    """bf16, or fp32 on a processor that emulates it, 70 times slower."""
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def _compare(kind: str, ways: dict[str, Any], rounds: int, steps: int) -> None:
    """A round is all ways in turn; the first is what the others are held against."""
    seen: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(rounds):
        for name, way in ways.items():
            found = way(seed)
            ends = found["ends"][steps // 4 :]
            each = statistics.median(after - before for before, after in pairwise(ends))
            seen[name].append(BATCH * BLOCK / each)
            losses[name].append(statistics.mean(found["losses"][-10:]))
    first = next(iter(ways))
    print(f"\n{kind} of 4 layers, 256 wide; {VOCABULARY} tokens; blocks of {BLOCK}; batch {BATCH}; {steps} steps; "
          f"median of {rounds} rounds, in turn; {os.cpu_count()} cores\n")  # fmt: skip
    print(f"| way | tokens/s | ratio in the same round | loss, steps {steps - 9}-{steps}: mean, least to most |")
    print("|---|---|---|---|")
    for name, speeds in seen.items():
        ratio = statistics.median(one / base for one, base in zip(speeds, seen[first], strict=True))
        low, high = min(losses[name]), max(losses[name])
        shown = f"{statistics.mean(losses[name]):.3f}, {low:.3f} to {high:.3f}"
        print(f"| {name} | {statistics.median(speeds):,.0f} | {ratio:.2f} | {shown} |")


def tokens(megabytes: int = 100) -> None:
    """The same text, whole, into blocks; the most memory that any process had."""
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(Path(made), megabytes)
        kept: dict[str, tuple[float, float, int]] = {}
        for name in ("dray", "datasets.map", "dray", "datasets.map"):
            before = time.time()
            if name == "dray":
                count = json.loads(bench._run([sys.executable, "-c", TOKENS, str(bench.folder)])[1].splitlines()[-1])[
                    "tokens"
                ]
            else:
                count = bench.stock(1, 0, {}, {}, cold=True, only_tokens=True)["tokens"]
            seconds = time.time() - before
            if name not in kept or seconds < kept[name][0]:
                peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
                kept[name] = (seconds, kept.get(name, (0, peak, 0))[1], count)
        print(f"\n{megabytes} MB of text, {os.cpu_count()} cores, better of two, imports included\n")
        print("| way | seconds | tokens | peak of all so far, GB |\n|---|---|---|---|")
        for name, (seconds, peak, count) in kept.items():
            print(f"| {name} | {seconds:.1f} | {count:,} | {peak:.2f} |")
        print(f"\nratio {kept['datasets.map'][0] / kept['dray'][0]:.2f}")


TOKENS = """
import json, shutil, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from dray.train.data import datasets, formats, resolve
folder = Path(sys.argv[1])
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
shutil.rmtree(folder / "cold", ignore_errors=True)
text = resolve.dataset(str(folder / "text.txt"), "train")
made = datasets.tokenized(text, formats.Reading("text"), tokenizer, cache=folder / "cold")
print(json.dumps({"tokens": len(made.ids)}))
"""


def stream(rounds: int = 5, steps: int = 400) -> None:
    """32 samples a step by one rank: of 32 files, and of one with short lines, as a whole for each shard and cut."""
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(Path(made), 12)
        (bench.folder / "parts").mkdir()
        lines = bench.text.read_text().splitlines(keepends=True)
        documents = [json.dumps({"text": "".join(lines[at : at + 100])}) for at in range(0, len(lines), 100)]
        for part in range(32):
            (bench.folder / "parts" / f"{part}.jsonl").write_text("\n".join(documents[part::32]))
        (bench.folder / "one").mkdir()
        shutil.copy(bench.text, bench.folder / "one")
        cores = sorted({1, os.cpu_count() or 1})
        ways = [("parts", 32, count) for count in cores] + [("one", readers, cores[-1]) for readers in (1, 32)]
        seen: dict[tuple[str, int, int], list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                argv = [sys.executable, "-c", STREAM, str(bench.folder), *map(str, (*way, steps, BLOCK))]
                seen[way].append(float(bench._run(argv)[1].splitlines()[-1]))
        print(f"\nparts: documents of 4 KB in 32 files; one: 12 MB of lines in a file. 32 samples of {BLOCK} tokens a "
              f"step, {steps} steps; median of {rounds} rounds in turn\n")  # fmt: skip
        print("| files | cut for | cores | tokens/s | ratio in the same round |\n|---|---|---|---|---|")
        for (files, readers, count), speeds in seen.items():
            base = seen[ways[0] if files == "parts" else ("one", 1, cores[-1])]
            ratio = statistics.median(one / other for one, other in zip(speeds, base, strict=True))
            print(f"| {files} | {readers} | {count} | {statistics.median(speeds):,.0f} | {ratio:.2f} |")


STREAM = """
import os, sys, time
from pathlib import Path
folder, names, (readers, cores, steps, length) = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the plan sets it
from transformers import PreTrainedTokenizerFast
from dray.train.data import datasets, formats, resolve
from dray.train.data.feeds import Stream
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
encode = datasets.PLAIN.encoder(tokenizer, datasets.end_token(tokenizer))
reading = formats.Reading("text")
pieces = resolve.pieces(resolve.dataset(str(folder / names), "train"), reading, readers)
feed = Stream(pieces, reading, encode, shards=32, length=length, seed=1)
feed.rows(range(32))
began = time.perf_counter()
for step in range(1, steps + 1):
    feed.rows(range(32 * step, 32 * step + 32))
print(32 * length * steps / (time.perf_counter() - began))
"""


def start(rounds: int = 3) -> None:
    """Seconds to the end of the first step, with nothing cached and with the tokens made."""
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(Path(made), 12)
        seen: dict[str, list[float]] = {}
        fp32 = "train.precision=fp32"
        for _ in range(rounds):
            for cold in (True, False):
                kind = "cold" if cold else "warm"
                seen.setdefault(f"Trainer, {kind}", []).append(bench.stock(2, 0, {}, {}, cold=cold)["ends"][0])
                seen.setdefault(f"dray, {kind}", []).append(bench.dray(2, 0, fp32, cold=cold)["ends"][0])
        for name, times in seen.items():
            base = seen[f"Trainer, {name.split()[-1]}"]
            ratio = statistics.median(one / other for one, other in zip(times, base, strict=True))
            print(f"| {name} | {statistics.median(times):.2f} | {ratio:.2f} |")


def checkpoint(rounds: int = 3) -> None:
    """What the loop is held up by, and how much longer the steps around it take: steps go on while dray writes."""
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(Path(made), 12)
        (bench.folder / "out").mkdir()
        wide = {"n_embd": 512, "n_head": 8}
        words = [*(f"model.config.{name}={value}" for name, value in wide.items()), "checkpoint.every=[[0, 6]]"]
        ways = {
            "dray, one rank": lambda: bench.dray(18, 0, *words),
            "dray, two ranks, ddp": lambda: bench.dray(18, 0, *words, "train.strategy=ddp", ranks=2),
            "dray, two ranks, fsdp": lambda: bench.dray(18, 0, *words, "train.strategy=fsdp", ranks=2),
            "Trainer's own": lambda: bench.stock(18, 0, {"save_strategy": "steps", "save_steps": 6}, wide),
            "torch.save, at once": lambda: bench.stock(18, 0, {}, wide, save=6),
        }
        held: dict[str, list[float]] = {way: [] for way in ways}
        longer: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, train in ways.items():
                seen = train()
                lines = seen.get("lines") or []
                held[way] += seen.get("held") or [line["checkpoint_s"] for line in lines if line["checkpoint_s"]]
                longer[way] += _longer(seen["ends"])
        print("| | held up, s | least | most | four steps longer by, s |\n|---|---:|---:|---:|---:|")
        for way, found in held.items():
            times = f"{statistics.median(found):.3f} | {min(found):.3f} | {max(found):.3f}"
            print(f"| {way} | {times} | {statistics.median(longer[way]):.2f} |")


def _longer(ends: list[float]) -> list[float]:
    """The four steps around each save but the last, beside four others."""
    steps = [after - before for before, after in pairwise(ends)]
    plain = statistics.median(steps)
    return [sum(steps[save - 2 : save + 2]) - 4 * plain for save in (6, 12)]


if __name__ == "__main__":
    each = {one.__name__: one for one in (speed, masked, tokens, stream, start, checkpoint)}
    each[sys.argv[1]](*map(int, sys.argv[2:]))
