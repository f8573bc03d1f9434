"""Ranks without their start: imports what a rank imports, once, and then becomes as many ranks as it is told.

A line of JSON comes in for each run (what it is, its file, a log and an environment for each rank), a line with the
process ids goes out, and one with the exit codes and the largest peak of memory once all of them have ended.
"""

from __future__ import annotations

import json
import os
import resource
import sys

os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
answers = os.fdopen(os.dup(1), "w")  # DeepSpeed speaks on stdout as it is imported
os.dup2(2, 1)

import torch  # noqa: E402
import transformers.models.bert.modeling_bert  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401

from dray.train import __main__ as train  # noqa: E402
from dray.train import errors  # noqa: E402
from dray.train.outputs import __main__ as outputs  # noqa: E402

try:
    from dray.train.parallel import zero  # noqa: F401
except ImportError:
    print("no deepspeed here", file=sys.stderr)


def refuse(*_, **__):
    raise RuntimeError("what another rank sends would be unpickled")


torch.distributed.distributed_c10d._tensor_to_object = refuse  # all of torch's *_object collectives come to it
MAINS = {"plan": train.main, "job": outputs.main}


def become(kind: str, file: str, log: str, env: dict[str, str]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    if size := int(env.get("FILE_SIZE", 0)):  # as a quota does it
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    errors.guarded(MAINS[kind], file)


for line in sys.stdin:
    run = json.loads(line)
    pids = []
    for rank in run["ranks"]:
        pid = os.fork()
        if pid == 0:
            become(run["kind"], run["file"], rank["log"], rank["env"])
        pids.append(pid)
    print(json.dumps(pids), file=answers, flush=True)
    codes = {}
    peak = 0
    while len(codes) < len(pids):
        pid, status, used = os.wait4(-1, 0)
        peak = max(peak, used.ru_maxrss * 1024)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # as the runner of a node does
            for other in set(pids) - set(codes):
                os.kill(other, 9)
    print(json.dumps({"codes": [codes[pid] for pid in pids], "peak": peak}), file=answers, flush=True)
