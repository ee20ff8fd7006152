"""Find the process that owns the store of a job, and watch the launcher of this host.

The store ends with its owner. A launcher that is lost is noticed, and one that waits forever for a store on a host that
is lost is ended.

torchrun asks the store about other nodes in each round of its loop. When packets vanish, that question has no time-out:
the launcher neither sees that its ranks have ended, nor runs the handler of a signal.
"""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from autopar.runtime.processes.watch.beat import DEAD, STOPPED, Beat, Process, process_of
from autopar.runtime.processes.watch.verdict import LOST

STORE_VARIABLE = "AUTOPAR_STORE"  # host:port of the store of ``launch``, which shows the message itself


def is_launched() -> bool:
    """Return whether ``launch`` started this process. Then ``launch`` shows the message, and prefixes lines."""
    return bool(os.environ.get(STORE_VARIABLE))


class Holder:
    """The owner of a job's store: a launcher (ours, or torchrun), rank 0, or a file.

    Attributes:
        is_rank_0: whether it is rank 0.
        is_elsewhere: whether it is on another host: a launcher of several hosts holds the store on the host of rank 0.
        launcher: the launcher of this process; ``None`` if there is none.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        launched = is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_file = isinstance(store, dist.FileStore)
        self.is_rank_0 = not launched and not is_file
        self.launcher = process_of(os.getppid()) if launched or "TORCHELASTIC_RUN_ID" in os.environ else None
        node = os.environ.get("GROUP_RANK", "0")
        self.is_elsewhere = node != "0" if launched and not is_launched() else self.is_rank_0 and rank != 0

    def process(self, rank_0: Beat | None) -> Process | None:
        """Return the process, if it is known and on this host. ``rank_0``: the newest beat of rank 0."""
        if self.is_rank_0:
            return None if rank_0 is None else rank_0.process
        return None if self.is_elsewhere else self.launcher


LOOKS = 3.0  # seconds in which the launcher shows that it is awake; torchrun wakes up ten times a second
USUAL = 2.0  # wakes a second, without which it cannot be stuck: a shell, or a process that spawned us, sleeps always
ORDERLY = 1.0  # seconds that it has to end after SIGTERM


class LauncherWatch:
    """Watches the launcher of this host: without it nobody would start or end its ranks."""

    def __init__(self, process: Process, limit: float) -> None:
        self.process, self._limit, self._stopped = process, limit, 0.0
        self._begin = _wakes(process.pid)
        self._seconds = 0.0  # in which the store has answered

    def failure(self, seconds: float) -> str:
        """Return what has happened to it; empty if it runs. ``seconds``: since the last call."""
        self._seconds += seconds
        state = self.process.state()
        self._stopped = self._stopped + seconds if state == STOPPED else 0.0
        if state == DEAD:
            return LOST
        return "was stopped (SIGSTOP)" if self._stopped >= self._limit else ""

    def kill_if_stopped(self) -> None:
        """Kill it if it is stopped: it cannot leave by itself."""
        if self.process.state() == STOPPED:
            os.kill(self.process.pid, signal.SIGKILL)

    def end_if_stuck(self) -> bool:
        """End it with SIGTERM, then with SIGKILL, if it was awake before and is not any more. Return whether it was."""
        before, begun = _wakes(self.process.pid), time.monotonic()
        if before - self._begin < USUAL * max(self._seconds, 1.0):  # the link may go down before the first round
            return False
        while time.monotonic() - begun < LOOKS:
            time.sleep(0.1)
            if self.process.state() == DEAD or _wakes(self.process.pid) != before:
                return False
        for number, seconds in ((signal.SIGTERM, ORDERLY), (signal.SIGKILL, 0.0)):
            try:
                os.kill(self.process.pid, number)
            except (ProcessLookupError, PermissionError):
                return False
            begun = time.monotonic()
            while time.monotonic() - begun < seconds:
                time.sleep(0.05)
                if self.process.state() == DEAD:
                    return True
        return True


def _wakes(pid: int) -> int:
    """Return how often the main thread of a process has gone to sleep; 0 if the system does not say it."""
    try:
        with open(f"/proc/{pid}/task/{pid}/status") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches")), 0)
    except OSError:
        return 0
