"""The supervisor of child processes: the launcher, ranks without an agent, a rank's program, the preflight's ranks.

Signals and the ends of children come through one pipe, and children are signalled only between two looks at it: the
number of a process that has ended is never signalled, since it may be another's by then.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Container, Iterable, Mapping

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_AGAIN_S = 0.5  # a program that is still loading handles the signal later, and one may not end
SWEEP_S, _SWEEP_LOOK_S = 10.0, 0.02  # from SIGKILL to the end of what can end
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl


class Loop:
    """Calls those who wait for a file. The import of selectors would cost a rank's supervisor more than all else."""

    def __init__(self) -> None:
        self._poll = select.epoll()  # the first node watches thousands of others, and few of them at a time speak
        self._watched: dict[int, Callable[[], None]] = {}

    def watch(self, file: int, call: Callable[[], None]) -> None:
        """Have `look` call this when the file is readable."""
        self._watched[file] = call
        self._poll.register(file, select.POLLIN)

    def forget(self, file: int) -> None:
        """Stop watching a file, before it is closed."""
        del self._watched[file]
        self._poll.unregister(file)

    def look(self, seconds: float | None = None) -> None:
        """Call those whose files are readable; wait for that, but for these seconds at most."""
        for file, _ in self._poll.poll(None if seconds is None else max(0.0, seconds) + 0.001):
            if call := self._watched.get(file):
                call()


class Children(Loop):
    """The children of this process, each with a label that the caller gives, such as a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, int] = {}
        self._pipe, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals: list[int] = []
        self.watch(self._pipe, self._read_signals)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (*STOPS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # Python has written the number into the pipe by then
        self._serving: dict[int, Callable[[int], None]] = {}
        self._kill_at = 0.0
        self._asks, self._asked = False, set[int]()

    def start(
        self,
        argv: list[str],
        *,
        label: int = 0,
        env: Mapping[str, str] | None = None,
        on_parent_death: int = signal.SIGTERM,
        session: bool = False,
        output: int | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        """Start a program; it gets the signal `on_parent_death` if this process is killed. OSError: it cannot start.

        A `session` of its own keeps signals to this process's group away; this process passes them on. A child with
        `ended` serves the others: nobody waits for it, and it ends with this process. If it ends before them, `wait`
        calls `ended` with its code.
        """
        failed, report = os.pipe2(os.O_CLOEXEC)
        own = os.getpid()
        # A signal between fork and exec would be lost, or wake the parent by the pipe that both have.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            child = os.fork()
            if child == 0:
                try:
                    _prctl(_PR_SET_PDEATHSIG, on_parent_death)
                    if os.getppid() != own:  # it was killed before this child asked for the signal
                        os._exit(128 + on_parent_death)
                    if session:
                        os.setsid()
                    if output is not None:
                        os.dup2(output, 1)
                        os.dup2(output, 2)
                    # Python ignores the last two, and a shell could not undo that.
                    for number in (*STOPS, signal.SIGPIPE, signal.SIGXFSZ):
                        signal.signal(number, signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
                    os.execvpe(argv[0], argv, os.environ if env is None else env)
                except OSError as error:
                    os.write(report, str(error.errno).encode())
                finally:
                    os._exit(127)
        finally:  # also where no more processes are allowed
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            os.close(report)
        with open(failed, "rb") as answer:
            reason = answer.read()
        if reason:
            os.waitpid(child, 0)
            raise OSError(int(reason), os.strerror(int(reason)), argv[0])
        if ended:
            self._serving[child] = ended
        else:
            self.running[child] = label

    def tell(self, number: int) -> None:
        """Signal all children."""
        for child in self.running:
            os.kill(child, number)

    def ask(self) -> None:
        """Have `wait` ask children and their children to save and end, each once it handles the signal."""
        self._asks = True

    def _ask(self, processes: Iterable[int]) -> None:
        """Send SIGUSR1 once to each process that handles it, and look at the children of the others: it kills those."""
        for process in processes:
            if not handles(process, signal.SIGUSR1):
                self._ask(below(process))
            elif process not in self._asked:
                self._asked.add(process)
                try:  # noqa: SIM105  the import of contextlib would cost a rank's supervisor more
                    os.kill(process, signal.SIGUSR1)
                except ProcessLookupError:  # it has just ended, and its own parent has noticed
                    pass

    def end(self, grace: float) -> None:
        """Ask all children to end; `wait` kills those that have not ended after this many seconds."""
        if not self._kill_at:
            self._kill_at = time.monotonic() + grace
            self.tell(signal.SIGTERM)

    def wait(self, seconds: float | None = None) -> tuple[list[int], dict[int, int]]:
        """Signals to this process, also those that came in `look`, and the codes of ended children by label.

        It waits for these seconds at most.
        """
        if self._asks:
            self._ask(self.running)
        if 0 < self._kill_at < time.monotonic():
            self.tell(signal.SIGKILL)
        if self._kill_at or self._asks:
            seconds = _AGAIN_S if seconds is None else min(seconds, _AGAIN_S)
        self.look(0.0 if self._signals else seconds)
        signals, self._signals = self._signals, []
        ended = {}
        while self.running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            code = os.waitstatus_to_exitcode(status)
            if child in self.running:  # others serve, or are orphans in a container
                ended[self.running.pop(child)] = code
            elif child in self._serving:
                self._serving.pop(child)(code)
        return signals, ended

    def _read_signals(self) -> None:
        self._signals += [number for number in os.read(self._pipe, 4096) if number != signal.SIGCHLD]

    def sweep(self) -> bool:
        """Kill all children within SWEEP_S; return whether none is left. Others may then be started.

        After `adopt` these include what a launcher has left behind. They have the rest of the grace of `end`.
        """
        _signal_all(signal.SIGTERM, self._kill_at, self._serving)
        left = _signal_all(signal.SIGKILL, time.monotonic() + SWEEP_S)
        self.running, self._kill_at = {}, 0.0
        self._asks, self._asked = False, set()
        self._serving.clear()
        return not left


def adopt() -> None:
    """Become the parent of ranks whose launcher has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _signal_all(number: int, deadline: float, spared: Container[int] = ()) -> list[int]:
    """Signal each child once, and reap those that end, until the deadline; return those that are left."""
    signalled: set[int] = set()
    while (left := [child for child in below(os.getpid()) if child not in spared]) and time.monotonic() < deadline:
        for child in left:
            if child not in signalled:
                os.kill(child, number)
        signalled.update(left)
        time.sleep(_SWEEP_LOOK_S)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left
            pass
    return left


def handles(process: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            caught = next(line for line in file if line.startswith(b"SigCgt:"))
    except OSError:  # it has ended
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def below(process: int) -> list[int]:
    """The children of all the process's threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended
        pass
    return found


def die_with_parent() -> int:
    """Get SIGTERM when the parent ends; return its process id, since `os.getppid` changes then."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid()


def exit_code(code: int) -> int:
    """The exit code as a shell gives it: 128 plus the number of a signal."""
    return code if code >= 0 else 128 - code


def ended_with(code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL`."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
