"""Notice that the launcher of this host is lost, and end one that waits forever for a store on a host that is lost.

torchrun asks the store about other nodes in each round of its loop. When packets vanish, that question has no time-out:
the launcher neither sees that its ranks have ended, nor runs the handler of a signal.
"""

from __future__ import annotations

import os
import signal
import time

from autopar.runtime.processes.watch.beat import DEAD, STOPPED, Process
from autopar.runtime.processes.watch.verdict import LOST

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
