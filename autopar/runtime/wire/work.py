"""End an operation no earlier than its transfer on the emulated wire.

Who has waited is let on by alarms: functions that one thread of this process calls at given times.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from autopar.runtime.wire.carry import Carried
from autopar.runtime.wire.clock import now, sleep_until
from autopar.runtime.wire.transfer import ALIVE, LONGEST_PAUSE, Transfer
from autopar.torch_private import source_rank_of


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


NO_TIMEOUT = timedelta(0)  # what torch passes for the time-out of the group
ALARMS = Alarms()


def wait_for(work: distributed.Work, timeout: timedelta) -> None:
    """Wait for a work of gloo; ``RuntimeError`` if it fails."""
    if timeout == NO_TIMEOUT:
        work.wait()
    else:
        work.wait(timeout)


class MessageWork(distributed.Work):
    """A send or a receive. Its state is not known until it is waited for, as on gloo.

    Args:
        inner: the work of gloo.
        transfer: its transfer on the wire, if the other rank is known.
        found: for a receive from any rank: makes and issues the transfer from the sender.
    """

    def __init__(
        self, inner: distributed.Work, transfer: Transfer | None, found: Callable[[int], Transfer] | None = None
    ) -> None:
        super().__init__()
        self._inner, self._transfer, self._found = inner, transfer, found
        self._arrived: float | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the message, and for its deadline; ``RuntimeError`` if the other rank has ended."""
        since = now()
        if self._arrived is None:
            wait_for(self._inner, timeout)
            self._arrived = now()
        if self._transfer is None:
            assert self._found is not None
            self._transfer = self._found(self._source_rank())
        sleep_until(self._transfer.wait(self._arrived, since).end)
        return True

    def is_completed(self) -> bool:
        """Return whether it has been waited for, and its time is past."""
        times = None if self._transfer is None else self._transfer.times
        return times is not None and now() >= times.end

    def _source_rank(self) -> int:
        return source_rank_of(self._inner)


class InOrder:
    """The collectives of one group that are under way, in the order of issue."""

    def __init__(self) -> None:
        self._works: deque[CollectiveWork] = deque()
        self._lock = threading.Lock()

    def add(self, work: CollectiveWork) -> None:
        with self._lock:
            self._works.append(work)

    def release(self) -> None:
        """Let works end from the first on, up to the first whose data has not arrived."""
        while True:
            with self._lock:
                if not self._works or not self._works[0].has_arrived:
                    return
                work = self._works.popleft()
            work.let_end()


class CollectiveWork(distributed.Work):
    """A collective. It ends when its data has arrived, all earlier ones of the group have ended, and its time is past.

    Args:
        carried: the works of gloo.
        transfer: its transfer on the wire.
        order: the works of its group.
    """

    def __init__(self, carried: Carried, transfer: Transfer, order: InOrder) -> None:
        super().__init__()
        self._inner, self._finish = carried
        self._order, self._transfer = order, transfer
        self._data = torch.futures.collect_all([work.get_future() for work in self._inner])
        self._arrived = 0.0
        self._error: Exception | None = None
        self.has_arrived = False  # the data has arrived, and the times are known
        self._may_end = threading.Event()  # this holds for all earlier collectives too
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._signal: torch.futures.Future[Any] | None = None
        self._looked = 0.0
        order.add(self)
        self._data.add_done_callback(self._note_data)

    # -- called in gloo's threads and in that of the alarms

    def _note_data(self, data: torch.futures.Future[Any]) -> None:
        try:
            for one in data.value():
                one.value()
            if self._finish is not None:
                self._finish()
        except Exception as error:
            self._error = error
        self._arrived = self._looked = now()
        self._look()

    def _look(self) -> None:
        """Ask the table for the times; ask again later if they are not decided."""
        try:
            if self._error is None and not self._transfer.decided(self._arrived):
                self._error = self._given_up()
                if self._error is None:
                    ALARMS.at(now() + LONGEST_PAUSE, self._look)
                    return
        except Exception as error:  # the table is locked
            self._error = error
        self.has_arrived = True
        self._order.release()

    def _given_up(self) -> RuntimeError | None:
        """Return an error if a rank has ended, or has not issued the transfer within the time-out."""
        if now() < self._looked + ALIVE:
            return None
        self._looked = now()
        error = self._transfer.missing()
        if error is None and now() > self._arrived + self._transfer.timeout:
            error = self._transfer.too_late()
        return None if error is None or self._transfer.decided(self._arrived) else error

    def let_end(self) -> None:
        """Let this collective end at its deadline: all earlier ones have their data and their times."""
        with self._lock:
            self._may_end.set()
        self._set_alarm()

    # -- called by users of the work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the data and the deadline.

        Raises:
            RuntimeError: a rank has ended, or the time-out is over, as on gloo.
        """
        for work in self._inner:
            wait_for(work, timeout)
        seconds = timeout.total_seconds() if timeout > NO_TIMEOUT else self._transfer.timeout
        if not self._may_end.wait(seconds):
            transfer = self._transfer
            raise RuntimeError(
                f"{transfer.name} of group {transfer.group} has timed out after {seconds:g} s: not all ranks have "
                f"issued it, or an earlier collective of the group has not ended"
            )
        if self._error is not None:
            raise self._error
        sleep_until(self._end)
        return True

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return or raise at once."""
        return self._may_end.is_set() and now() >= self._end

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that gets gloo's result at the deadline, or its error."""
        with self._lock:
            if self._future is None:
                self._signal = torch.futures.Future()
                self._future = self._signal.then(lambda _: self.result())
        self._set_alarm()
        return self._future

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that gloo has written."""
        if self._error is not None:
            raise self._error
        return [tensor for future in self._data.value() for tensor in future.value()]

    @property
    def _end(self) -> float:
        times = self._transfer.times
        return 0.0 if times is None else times.end

    def _set_alarm(self) -> None:
        with self._lock:
            signal = self._signal
            if signal is None or not self._may_end.is_set():
                return
            self._signal = None
        ALARMS.at(self._end, lambda: signal.set_result(None))
