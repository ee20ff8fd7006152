"""Call functions at given times, from one thread of this process."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from autopar.runtime.wire.clock import now


class Alarms:
    """A thread that sleeps until the next alarm. It starts with the first one, and ends with the process."""

    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, time: float, function: Callable[[], None]) -> None:
        """Call a function no earlier than ``time``, in seconds of ``clock.now``; the first given first."""
        with self._changed:
            heapq.heappush(self._alarms, (time, next(self._number), function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="autopar-wire", daemon=True)
                self._thread.start()
            if self._alarms[0][2] is function:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            self._next()()

    def _next(self) -> Callable[[], None]:
        """Wait until the next alarm is due. Keep no reference to its function, because that keeps tensors alive."""
        with self._changed:
            while not self._alarms or (left := self._alarms[0][0] - now()) > 0:
                self._changed.wait(left if self._alarms else None)
            return heapq.heappop(self._alarms)[2]
