"""Ranks that ignore SIGTERM, each with two processes that it leaves behind; rank 1 dies as it is told to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOW, MARK = sys.argv[1:]
rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# Out of its session, and a child of nobody's any more, without the environment of the run.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", f"{MARK}1"], {})
    os._exit(0)
os.wait()
subprocess.Popen(["sleep", f"{MARK}2"], start_new_session=True)
Path(f"up-{MARK}-{rank}").touch()
while HOW == "loops" or rank != 1 or not Path(f"up-{MARK}-0").exists():
    time.sleep(0.1)
if HOW == "exits":
    os._exit(3)
os.kill(os.getpid(), signal.SIGSEGV)
