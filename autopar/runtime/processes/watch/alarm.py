"""Wake the watch at once when a process of this host ends, or when SIGTERM comes.

torchrun ends all ranks with SIGTERM within 0.1 to 0.5 s after one was killed: before the next beat. A main thread that
is blocked in a collective runs no handler, so Python writes the signal's number to a socket, which a thread reads. The
watch then finds out which rank is to blame, and ends the process as the signal would have. A handler of the user's own
stays; forks of this process do not inherit the alarm.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from types import FrameType
from typing import NoReturn

from autopar.runtime.processes.watch.beat import DEAD, UNKNOWN, Process

SETTLING = 0.05  # seconds to wait after one process ended, because others may be ending at the same time
PATIENCE = 4.0  # seconds that the watch has after SIGTERM to end the process
OVER = b"\0"


class Alarm:
    """Wakes the thread of the watch."""

    def __init__(self) -> None:
        self._signals, self._written = socket.socketpair()
        self._bell, self._rope = socket.socketpair()
        for end in (self._written, self._bell, self._rope):
            end.setblocking(False)
        self._processes: dict[Process, int | None] = {}  # watched process → its descriptor, while it runs
        self._came = False

    def start(self) -> None:
        """Handle SIGTERM, unless the user handles it."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop uses it
            signal.set_wakeup_fd(before)
            return
        _taken.append(self)
        signal.signal(signal.SIGTERM, _end_later)
        threading.Thread(target=self._listen, name="autopar watch of SIGTERM", daemon=True).start()

    def stop(self) -> None:
        """Stop handling SIGTERM, and let ``wait`` return."""
        for end in (self._written, self._rope):
            with contextlib.suppress(OSError):  # a full socket wakes the reader up, too
                end.send(OVER)
        if self in _taken and threading.current_thread() is threading.main_thread():
            _give_back()

    def __del__(self) -> None:
        """Close all descriptors."""
        for end in (self._signals, self._written, self._bell, self._rope):
            end.close()
        for descriptor in self._processes.values():
            if descriptor is not None:
                os.close(descriptor)

    def _listen(self) -> None:
        while (numbers := self._signals.recv(4096)) and OVER not in numbers:
            if signal.SIGTERM in numbers:
                self._came = True
                with contextlib.suppress(OSError):
                    self._rope.send(OVER)
                time.sleep(PATIENCE)
                if self.is_terminated:
                    end_by_sigterm()  # the watch waits for the store

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            self._written.send(bytes([signal.SIGTERM]))

    @property
    def is_terminated(self) -> bool:
        """Whether SIGTERM came, and only the watch handles it."""
        return self._came and signal.getsignal(signal.SIGTERM) is _end_later

    def look_at(self, process: Process) -> None:
        """Wake up when a process ends, if it runs on this host."""
        if process in self._processes or not hasattr(os, "pidfd_open"):
            return
        self._processes[process] = None
        if process.state() not in (DEAD, UNKNOWN):
            with contextlib.suppress(OSError):
                self._processes[process] = os.pidfd_open(process.pid)

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until a process ends or SIGTERM comes."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        processes = {descriptor: process for process, descriptor in self._processes.items() if descriptor is not None}
        for descriptor in processes:
            poll.register(descriptor, select.POLLIN)
        ended = [descriptor for descriptor, _ in poll.poll(seconds * 1000) if descriptor in processes]
        for descriptor in ended:
            self._processes[processes[descriptor]] = None
            os.close(descriptor)
        if ended:
            time.sleep(SETTLING)
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)


_taken: list[Alarm] = []  # none or one: the alarm that handles SIGTERM


def _end_later(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the watch ends this process, or the handler itself if there is no watch."""
    if not _taken:
        end_by_sigterm()
    for alarm in _taken:
        alarm.ring()  # once more, for an event loop may have taken the descriptor


def end_by_sigterm() -> NoReturn:
    """End this process by SIGTERM, as if nobody handled it. Any thread may call it, so it avoids ``signal.signal``."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)
    os._exit(128 + signal.SIGTERM)


def _give_back() -> None:
    if _taken:
        _taken.clear()
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _end_later:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_back)
