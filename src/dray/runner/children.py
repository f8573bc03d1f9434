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
from collections.abc import Callable, Mapping

TYPE_CHECKING = False  # typing's own would cost more than all else here
if TYPE_CHECKING:
    from dray.runner.save_request import SaveRequest

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_ASKING_S = 1.0  # a program that is still loading handles the signal later
_SWEEP_S = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl


class Events:
    """What happened: signals to this process, and codes of ended children by label."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.ended: dict[int, int] = {}


class Children:
    """The children of this process, each with a label that the caller gives, such as a rank."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self._poll = select.epoll()  # the first node watches thousands of others, and few of them at a time speak
        self._pipe, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._pipe, select.POLLIN)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in (*STOPS, signal.SIGCHLD):
            signal.signal(number, _through_the_pipe)
        self._serving: dict[int, Callable[[int], None]] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._kill_at = 0.0
        self._save_request: SaveRequest | None = None

    def start(
        self,
        argv: list[str],
        *,
        label: int = 0,
        env: Mapping[str, str] | None = None,
        on_parent_death: int = signal.SIGTERM,
        session: bool = False,
        output: int | None = None,
        dialogue: int | None = None,
        inherit: int | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        """Start a program; it gets the signal `on_parent_death` if this process is killed. OSError: it cannot start.

        `output` becomes its standard output and error, `dialogue`, a socket, its standard input and output.

        A `session` of its own keeps signals to this process's group away; this process passes them on. A child with
        `ended` serves the others: nobody waits for it, and it ends with this process. If it ends before them, `wait`
        calls `ended` with its code.
        """
        here = os.getpid()
        failed, report = os.pipe2(os.O_CLOEXEC)
        # A signal between fork and exec would be lost, or wake the parent by the pipe that both have.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        child = os.fork()
        if child == 0:
            try:
                _prctl(_PR_SET_PDEATHSIG, on_parent_death)
                if os.getppid() != here:  # it died before it was asked for
                    os._exit(128 + on_parent_death)
                if session:
                    os.setsid()
                if output is not None:
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                if dialogue is not None:
                    os.dup2(dialogue, 0)
                    os.dup2(dialogue, 1)
                if inherit is not None:
                    os.set_inheritable(inherit, True)
                for number in STOPS:
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
                os.execvpe(argv[0], argv, os.environ if env is None else env)
            except OSError as error:
                os.write(report, str(error.errno).encode())
            finally:
                os._exit(127)
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

    def watch(self, file: int, call: Callable[[], None]) -> None:
        """Have `wait` call this when the file is readable."""
        self._watched[file] = call
        self._poll.register(file, select.POLLIN)

    def forget(self, file: int) -> None:
        """Stop watching a file, before it is closed."""
        del self._watched[file]
        self._poll.unregister(file)

    def tell(self, number: int) -> None:
        """Signal all children."""
        for child in self.running:
            os.kill(child, number)

    def ask(self) -> None:
        """Ask children and their children to save and end; `wait` asks those that do not handle the signal yet."""
        if self._save_request is None:
            from dray.runner.save_request import SaveRequest  # noqa: PLC0415  few runs are asked

            self._save_request = SaveRequest()
            self._save_request.tell(self.running)

    def end(self, grace: float) -> None:
        """Ask all children to end; `wait` kills those that have not ended after this many seconds."""
        if not self._kill_at:
            self._kill_at = time.monotonic() + grace
            self.tell(signal.SIGTERM)

    def wait(self, seconds: float | None = None) -> Events:
        """Wait for signals and ended children, for these seconds at most."""
        if self._kill_at:
            left = self._kill_at - time.monotonic()
            if left <= 0:
                self.tell(signal.SIGKILL)
                left = 1.0
            seconds = left if seconds is None else min(seconds, left)
        if self._save_request:
            self._save_request.tell(self.running)
            seconds = _ASKING_S if seconds is None else min(seconds, _ASKING_S)
        events = Events()
        for file, _ in self._poll.poll(None if seconds is None else max(0.0, seconds) + 0.001):
            if file == self._pipe:
                events.signals += [number for number in os.read(file, 4096) if number != signal.SIGCHLD]
            elif file in self._watched:
                self._watched[file]()
        while self.running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            code = os.waitstatus_to_exitcode(status)
            if child in self.running:  # others serve, or are orphans in a container
                events.ended[self.running.pop(child)] = code
            elif child in self._serving:
                self._serving.pop(child)(code)
        return events

    def sweep(self, limit: float) -> bool:
        """Kill all children within these seconds; return whether none is left.

        After `adopt` these include what a launcher has left behind. They have the rest of the grace of `end`.
        """
        told: set[int] = set()
        while time.monotonic() < self._kill_at and (left := set(_children()) - self._serving.keys()):
            for child in left - told:
                os.kill(child, signal.SIGTERM)
            told |= left
            _pause()
        deadline = time.monotonic() + limit
        while (left := set(_children())) and time.monotonic() < deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
            _pause()
        return not left

    def close(self, limit: float) -> tuple[bool, list[int]]:
        """Sweep and `release`; return whether no child is left, and the signals for `wait`."""
        return self.sweep(limit), self.release()

    def release(self) -> list[int]:
        """Give signals back to Python, and return those for `wait`. Another object may take over what runs."""
        signal.set_wakeup_fd(-1)
        for number in (*STOPS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        with open(self._pipe, "rb", buffering=0) as unread:
            late = [number for number in unread.read() or b"" if number in STOPS]
        os.close(self._wakeup)
        return late


def adopt() -> None:
    """Become the parent of ranks whose launcher has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[int]:
    """The children of this process that can still run."""
    found, me = [], str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if parent.decode() == me and state != b"Z":
            found.append(int(name))
    return found


def _pause() -> None:
    """Wait until more children may have ended, and reap those that have."""
    time.sleep(_SWEEP_S)
    while _reap():
        pass


def _reap() -> int:
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


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


def _through_the_pipe(_number: int, _frame: object) -> None:
    """Python writes the number into the pipe before it calls this."""
