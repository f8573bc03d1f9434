"""`python -m dray.runner PLAN.json`: find the other nodes, then supervise this node's launcher."""

from __future__ import annotations

import glob
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from dray.contract import exit_codes, failures, findings, heartbeat, run_folder, scratch
from dray.contract.findings import DrayError, Finding
from dray.contract.node_start import PREFLIGHT, RENDEZVOUS
from dray.runner import children, control, launcher, records, redact, rendezvous, say
from dray.runner.plan import Environ, Plan, node_rank, read, require_command
from dray.runner.rendezvous import StoppedError

if TYPE_CHECKING:
    from dray.runner.preflight import Preflight

_COMPILES_S = 15 * 60.0  # torch holds a lock while it compiles one extension
# A rank holds a file for each connection: 1,024, the usual soft limit, are too few beside other users who connect to
# Gloo's port. Not all that some machines allow: old programs close each number up to the limit, and 1,000,000,000 take
# minutes.
_FILES = 65_536


def main(path: str) -> int:
    """This node's exit code: the launcher's, or that of the failure which kept it from starting."""
    plan = read(path)
    launcher.set_variables(plan)
    os.environ[redact.PASSED] = " ".join(plan.recipe.pass_env)
    allow_files()
    return Runner(plan).run()


def allow_files() -> None:
    """Raise the limit of open files for this process, and so for the preflight, the launcher and all ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, hard), hard))


class Runner:
    """This node's runner, from its rendezvous with the others to its end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        identity = plan.world.identity
        self.number, self.name = os.environ.get(identity.node, "unknown"), os.environ.get(identity.name, "")
        self.unfit: Finding | None = None
        self.preflight: Preflight | None = None
        self.log: redact.Filter | None = None

    def run(self) -> int:
        """Meet the other nodes, and start the ranks until they end or must not be started again."""
        try:
            self.meet()
        except Exception as raised:
            error = findings.error(self.unfit) if self.unfit else failures.unexpected_error(raised)
            return self.refuse(error).code
        try:
            code = self.launch()
            while self.restart():
                code = self.launch()
        except Exception as raised:
            code = self.fail(failures.unexpected_error(raised))
        finally:
            self.leave()
        return code

    def meet(self) -> None:
        """Check this node, and connect it with the others."""
        self.plan = plan = self.plan._replace(me=node_rank(self.plan.world))
        self.timings = control.StartTimings(plan)
        require_command(plan)
        scratch.take(plan.scratch)
        children.adopt()
        if plan.preflight:
            self.check_node()
        channels, self.store, self.listener = rendezvous.meet(plan, self.unfit)
        self.timings.lap(RENDEZVOUS)
        own = channels[0].line.getsockname()[0] if plan.me else self.store[0]
        self.gloo = rendezvous.gloo_interface(own)
        self.supervised = children.Children()
        self.links = control.Control(plan, self.supervised, channels, self.timings)

    def check_node(self) -> None:
        """Check this node; the ranks of the preflight then wait for the other nodes."""
        from dray.runner.preflight import Preflight  # noqa: PLC0415  a run without it saves its import

        self.preflight = Preflight(self.plan)
        self.preflight.start()
        self.unfit = self.preflight.check_node(self.timings.parts)
        self.timings.lap(PREFLIGHT)
        if self.unfit:  # recorded before the rendezvous: srun ends all nodes with the first one that ends
            self.record(self.unfit)

    def launch(self) -> int:
        """Hand the socket to the store, run the preflight and the launcher; return this node's exit code."""
        plan, links = self.plan, self.links
        self.start, began = links.start, time.time()
        os.environ[records.OOM_KILLS_BEFORE] = records.oom_kills()
        environ = launcher.environment(plan, self.store, self.start, self.gloo)
        records.write_node(plan, environ)
        if self.listener:
            self.supervised.watch(self.listener.fileno(), self.serve)
            # Most programs of one rank never ask for the store, which costs an import of torch.
            if plan.world.size > 1 or "{ranks}" not in plan.launcher:
                self.serve()
        if self.preflight and not self.start.number:
            self.preflight.check_together(self.supervised, environ, links)
            self.timings.lap(PREFLIGHT)
        if extensions := environ.get("TORCH_EXTENSIONS_DIR"):
            remove_locks(extensions, began if self.start.number else began - _COMPILES_S)
        if not links.cause and not links.stopped:
            self.launch_ranks(environ)
            return self.lead()
        code = self.lead()  # of other nodes, which may have started their ranks
        return 128 + signal.SIGTERM if links.stopped else code

    def launch_ranks(self, environ: Environ) -> None:
        """Start the launcher, in a session of its own: what the engine's group hears, it would hear twice."""
        self.timings.launched()
        command = launcher.argv(self.plan, *self.store)
        self.log = log = redact.between()
        try:
            self.supervised.start(command, env=environ, session=True, output=log.writer if log else None)
        except OSError as error:
            raise DrayError(f"the launcher cannot start: {command[0]}: {error.strerror}", code=127) from error
        if self.links.asked:  # between two starts
            self.supervised.ask()
        if log:
            log.watch(self.supervised)

    def finish_log(self) -> None:
        """Write the rest of the launcher's output."""
        if self.log:
            self.log.finish()

    def lead(self) -> int:
        """Wait for the end of all nodes' ranks, and record what no rank could; return this node's exit code."""
        links, hang = self.links, self.links.hang
        code = links.lead(self.failure)
        cause = links.cause if links.start is self.start else links.start.cause
        self.finish_log()
        if cause and not links.stopped:
            records.first_failure(self.plan)
        if cause and not self.plan.world.shared_folder:  # the record is on another machine
            if not hang or not hang.begun:
                self.record(cause)
            elif self.plan.me:  # the first node has written it, with the frames
                hang.write_record(cause)
        return code

    def restart(self) -> bool:
        """Prepare the next start of all ranks, if the first node says so, once those before have ended."""
        links, plan = self.links, self.plan
        if links.start is not self.start:  # before this node can fail by a cause of its own
            records.set_aside(plan, links.start.number)
        elif not links.may_restart():
            return False
        records.require_image()
        if not self.supervised.sweep():  # with the store
            return False
        if self.listener:
            self.listener.close()
            self.listener = rendezvous.listen(plan.world)
            links.restart(self.listener.getsockname()[1])
            records.set_aside(plan, links.start.number)
        number, port, cause = links.start
        assert cause
        self.store = self.store[0], port
        heartbeat.clear(plan.scratch, plan.ranks)  # `lead` has recorded what they show of the ranks before
        say(f"restart {number} of {plan.world.max_restarts}: {cause.problem}")
        return True

    def leave(self) -> None:
        """Record what is known once all nodes have ended: lost nodes; on the first node, whether all ranks have saved,
        and whether they were in one process group. Then end what is left here, before the other nodes hear of it."""
        links, plan = self.links, self.plan
        for other, (since, found) in links.lost.items():
            log = f"{plan.folder}/{run_folder.node_log(other)}"
            records.write_failure(plan.folder, f"node-{plan.me}-lost-{other}", found, log, lost=True, time=since)
        if not plan.me and not links.stopped:
            if links.saved and not links.lost:
                records.put(f"{plan.folder}/{run_folder.SAVED}", "")
            if links.saved or not links.cause:
                records.write_process_group(plan.folder, plan.world.size, self.store)
        if links.stopped:  # ranks of a launcher that did not wait for them may still save
            self.supervised.end(control.GRACE)
        if not self.supervised.sweep():
            say(
                Finding(
                    f"processes of this node did not end within {children.SWEEP_S:.0f} s of SIGKILL",
                    wanted="no process of the run outlives the job",
                    fix="leave this node out (sbatch --exclude), and tell the administrators: its device or disk hangs",
                )
            )
        links.close()

    def fail(self, error: DrayError) -> int:
        """Tell all nodes why the ranks were not started; return the exit code once all have ended."""
        found, links = self.refuse(error), self.links
        links.can_restart = False
        if not links.cause:
            links.fail(found)
        return self.lead() or found.code

    def refuse(self, error: DrayError) -> Finding:
        """Print why the ranks were not started, and record it unless another node does."""
        with suppress(OSError):  # the disk of the log is full
            print(error, file=sys.stderr)
        found = error.finding
        if not isinstance(error, StoppedError):
            found = found._replace(node=found.node or self.name)
            self.record(found)
        return found

    def serve(self) -> None:
        """Start a process with torch that serves the store on the socket until the runner ends."""
        assert self.listener
        (host, port), file = self.store, self.listener.fileno()
        self.supervised.forget(file)
        self.listener.set_inheritable(True)
        argv = [sys.executable, "-m", "dray.tcp_store", host, str(port), str(file)]
        self.supervised.start(argv, on_parent_death=signal.SIGKILL, session=True, ended=self.store_ended)
        self.listener.close()

    def store_ended(self, code: int) -> None:
        """End the run of dray's trainer, which needs the store to save when asked; other programs may not need it."""
        if not code or self.links.cause or self.links.stopped:  # 0: there is no torch, so nobody can ask for it
            return
        found = Finding(
            f"the store has ended: {children.ended_with(code)}",
            fix="start the run again; with more memory (sbatch --mem) if the kernel killed the store for lack of it",
            code=exit_codes.RETRY,
            node=self.name,
        )
        if self.plan.recipe.train:
            self.record(found)
            self.links.end(found)
        else:
            say(found)

    def failure(self, code: int) -> Finding:
        """Why this node failed: its ranks' first failure, or else the launcher's own exit, which is then recorded."""
        self.finish_log()  # its last lines may be the reason
        if first := records.first_failure(self.plan):
            problem = f"rank {first['rank']} on {self.name}: {first['why']}"
            return Finding(problem, where=first["log"], code=first["code"], node=self.name, rank=first["rank"])
        problem = f"the launcher ended: {children.ended_with(code)}"
        found = Finding(problem, code=children.exit_code(code), node=self.name)
        self.record(found)
        return found

    def record(self, found: Finding) -> None:
        """Record why this node failed, unless an earlier failure of it is recorded: that is the cause."""
        folder, name = self.plan.folder, f"node-{self.number}"
        if not os.path.exists(f"{folder}/{run_folder.failure(name)}"):
            records.write_failure(folder, name, found, f"{folder}/{run_folder.node_log(self.number)}")


def remove_locks(folder: str, before: float) -> None:
    """Remove locks that a killed compiler of torch's extensions has left: a rank would wait for one for ever."""
    for path in glob.glob(f"{glob.escape(folder)}/**/lock", recursive=True):
        with suppress(OSError):  # another node was faster
            if os.stat(path).st_mtime < before:
                os.unlink(path)
                say(f"removed {path}: its compiler was killed")


if __name__ == "__main__":
    try:
        ended = main(sys.argv[1])
    except Exception as raised:  # a plan that cannot be read, or a folder in which no record can be left
        error = failures.unexpected_error(raised)
        print(error, file=sys.stderr)
        ended = error.finding.code
    sys.exit(ended)
