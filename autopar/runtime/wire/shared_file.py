"""Share one file in memory between the ranks of a host: the bytes of a table, its lock, and the ranks that live.

Locks of ``fcntl`` belong to a process and end with it, however it ends. So a killed rank never leaves the table
locked, and others see that it is gone: each rank holds a lock on one byte for as long as it lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import distributed

from autopar.runtime.wire.clock import now, sleep_until

KEY = "autopar_wire"  # in the store
BOOT = Path("/proc/sys/kernel/random/boot_id")  # names the host
TABLE_LOCK, FIRST_RANK = 0, 1  # bytes of the file that are locked
STALE = 5.0  # seconds in which rank 0 replaces the entry of an earlier group in the store
PAUSE = 50e-6  # seconds between two attempts to lock the table


class SharedFile:
    """A file, at first of zeros, that each rank of a job maps once.

    Args:
        path: of the file.
        size: its bytes.
        rank: of this process.
        timeout: the seconds to wait for a table that another process keeps locked.
    """

    def __init__(self, path: str, size: int, rank: int, timeout: float) -> None:
        self._path, self._rank, self._timeout = path, rank, timeout
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)  # not earlier, because closing releases all locks
        self.buffer = mmap.mmap(self._file, size)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, FIRST_RANK + rank)
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other threads and processes out.

        Raises:
            RuntimeError: another process keeps the table for longer than the time-out; it may be stopped.
        """
        with self._threads:
            self._lock_processes()
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, TABLE_LOCK)

    def _lock_processes(self) -> None:
        limit = now() + self._timeout
        while not self._try_lock(TABLE_LOCK):
            if now() > limit:
                raise RuntimeError(
                    f"another rank has kept the table of the emulated wire for {self._timeout:g} s; is it stopped?"
                )
            sleep_until(now() + PAUSE)

    def _try_lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank still runs."""
        if rank == self._rank:
            return True
        with self._threads:
            if not self._try_lock(FIRST_RANK + rank):
                return True
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, FIRST_RANK + rank)
            return False


def share(store: distributed.Store, rank: int, size: int, timeout: float, settings: dict[str, Any]) -> SharedFile:
    """Make a file on rank 0, and open it on all others. All ranks call it.

    Args:
        store: of the job.
        size: the bytes of the file.
        settings: the settings of the wire, which must be equal on all ranks.

    Raises:
        RuntimeError: the ranks are not on one host, or have different settings.
    """
    handle = None
    if rank == 0:
        handle = _nameless(size)
        path = f"/proc/{os.getpid()}/fd/{handle}"
        store.set(KEY, json.dumps({"host": _host(), "path": path, "settings": settings}))
    limit = now() + STALE
    while True:
        published = json.loads(store.get(KEY))
        here = published["host"] == _host() and os.path.exists(published["path"])
        if here or now() > limit:
            break
        sleep_until(now() + STALE / 100)  # an earlier group on this store may have left its path
    if not here:
        raise RuntimeError("an emulated wire needs all ranks on one host, because they share a table in its memory")
    if published["settings"] != settings:
        raise RuntimeError(
            f"rank {rank} emulates another wire than rank 0: {_shown(settings)}, not {_shown(published['settings'])}; "
            f"all ranks must call autopar.emulate with the same arguments"
        )
    shared = SharedFile(published["path"], size, rank, timeout)
    if handle is not None:
        weakref.finalize(shared, os.close, handle)  # the others open it by its number here
    return shared


def _nameless(size: int) -> int:
    """Return a new file in memory. It has no name, and is freed when no process has it open."""
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("an emulated wire needs Linux, for a table in shared memory")
    handle = os.memfd_create(KEY)
    os.ftruncate(handle, size)
    return handle


def _host() -> str:
    return BOOT.read_text().strip() if BOOT.exists() else os.uname().nodename


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
