"""`dray watch`: say when a run starts, stalls, is requeued or ends, by a line, a mail or a webhook."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from dray import process
from dray.cli.args import Run, Runs, program
from dray.config import dray_home
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError
from dray.runs.active_run.watch import Watcher, post_to_webhook, read_webhook
from dray.runs.status import DONE, FAILED, STOPPED, State
from dray.runs.store import find, require_own

_SENDMAIL = 'PATH=$PATH:/usr/sbin:/usr/lib; printf "%s\\n" "$1" | sendmail -t'


def watch(
    run: Run = "",
    mail: str = "",
    runs: Runs = None,
) -> int:
    """Watch a run from outside its job, through its attempts, and print a line when something happens to it.

    It runs on a login node, and says when the run starts, stalls, loses a node, diverges, is requeued, is held by
    Slurm, or ends. A job that Slurm holds is released, and a run whose job died is submitted again, as often as the
    recipe's max_requeues allows.

    --mail ADDRESS: Mail each line, too, by this machine's sendmail.

    dray watch 4711 --mail me@example.org
    """
    folder = require_own(find(run, runs))
    if mail and not re.fullmatch(r"[!-?A-~]+@[!-?A-~]+", mail):
        raise ConfigError("--mail has a wrong value", wanted="one address, such as me@example.org", found=ascii(mail))
    url = _webhook()

    def tell(line: str, seen: State) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M')}  {seen.run}: {line}", flush=True)
        if mail:
            _mail(mail, seen, line)
        if url and seen.state not in (DONE, FAILED, STOPPED):  # the job itself tells its end
            text = f"{seen.run}: {line}"
            if failed := post_to_webhook(url, text, run=seen.run, status=seen.state, steps=seen.step):
                print(f"dray: warning: {failed}")

    def submit() -> None:
        process.run([*program(), "submit", f"--run={folder}"])

    try:
        seen = Watcher(folder, tell, submit).watch()
    except KeyboardInterrupt:
        print("\nthe run goes on")
        return exit_codes.DONE
    code = seen.exit_code
    if code is None:
        code = exit_codes.DONE if seen.state == DONE else exit_codes.FAILED
    return code


def _webhook() -> str:
    return read_webhook(Path(os.environ.get("DRAY_WEBHOOK_FILE") or dray_home.configuration() / "webhook"))


def _mail(address: str, seen: State, line: str) -> None:
    text = f"To: {address}\nSubject: dray: {seen.run}: {seen.state}\n\n{line}\n\nrun folder: {seen.folder}"
    try:
        process.run(["bash", "-c", _SENDMAIL, "sendmail", text], seconds=60)
    except DrayError as failed:
        print(f"dray: warning: the mail was not sent: {failed.problem}")
