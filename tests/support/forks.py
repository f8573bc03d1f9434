"""Ranks without their start: imports what a rank imports, once, and then becomes as many ranks as it is told.

A line of JSON comes in for each run: what it is, its file or words, what Python is executed before it, and streams and
an environment for each rank. A line with the process ids goes out, and one with the exit codes and the largest peak of
memory once all of them have ended.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import runpy
import signal
import sys
import traceback
from typing import Any, NoReturn

os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
answers = os.fdopen(os.dup(1), "w")  # DeepSpeed speaks on stdout as it is imported
os.dup2(2, 1)

import torch  # noqa: E402
import torch.utils.tensorboard  # noqa: E402
import transformers.models.bert.modeling_bert  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401
from torch.distributed import distributed_c10d  # noqa: E402

from dray.train import __main__ as train  # noqa: E402
from dray.train import errors  # noqa: E402
from dray.train.outputs import __main__ as outputs  # noqa: E402

try:
    from dray.train.parallel import zero  # noqa: F401
except ImportError:
    print("no deepspeed here", file=sys.stderr)

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def refuse(*_, **__):
    raise RuntimeError("what another rank sends would be unpickled")


def python(words: list[str]) -> NoReturn:
    """As `python FILE WORDS` or `python -c CODE WORDS`."""
    code = 0
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def become(run: dict[str, Any], rank: dict[str, Any]) -> NoReturn:
    """`streams` are files; what a rank prints on stdout and on stderr is in one. It ends with the process before it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, file in enumerate(rank["streams"]):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY, 0o644), number)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.update(rank["env"])
    torch.set_num_threads(1)
    if size := int(rank["env"].get("FILE_SIZE", 0)):  # as a quota does it
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if run["kind"] == "python":
        python(run["words"])
    distributed_c10d._tensor_to_object = refuse  # all of torch's *_object collectives come to it
    exec(run.get("before", ""), {})
    errors.guarded({"plan": train.main, "job": outputs.main}[run["kind"]], run["file"])


gc.freeze()
for line in sys.stdin:
    run = json.loads(line)
    pids = []
    for rank in run["ranks"]:
        pid = os.fork()
        if pid == 0:
            become(run, rank)
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
