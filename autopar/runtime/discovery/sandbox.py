"""A sandbox: a function runs in a process of its own, and whatever happens there ends with it.

An op that is run on operands which nobody has seen it run on may write past their ends, never return, or keep something.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

SECONDS = 60


class SandboxError(Exception):
    """A sandbox ended without a result; says how."""


class CrashError(SandboxError):
    """It was ended by what ran in it."""


def isolated(function: Callable[[], Any]) -> Any:
    """What a function returns, which must be plain data. It sees all that is here and changes nothing of it.

    The process is a fork with one thread, as a worker of a ``DataLoader`` is; nothing in it may use an accelerator.

    Raises:
        SandboxError: the process did not end, or cannot be made on this system; ``CrashError``, it ended by itself.
    """
    if sys.platform != "linux":
        raise SandboxError("ops are run in a sandbox on Linux alone")
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        _serve(function, theirs)
    os.close(theirs)
    try:
        data = _received(ours)
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it has nothing left to do
        status = 0
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            _, status = os.waitpid(child, 0)
    if data is None:
        raise SandboxError(f"running it on pieces did not end in {SECONDS} seconds")
    if not data:
        code = os.waitstatus_to_exitcode(status)
        raise CrashError(f"running it on pieces ended the process{f' ({signal.Signals(-code).name})' if code < 0 else ''}")
    return pickle.loads(data)


def _serve(function: Callable[[], Any], out: int) -> None:
    """In the child: it leaves here, and runs nothing that its parent would run when it ends."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        sys.stdout = sys.stderr = os.fdopen(null, "w")  # those of the parent may be locked, by a thread that is not here
        torch.set_num_threads(1)
        data = pickle.dumps(function())
        while data:
            data = data[os.write(out, data) :]
    finally:
        os._exit(0)


def _received(source: int) -> bytes | None:
    """All that comes until the other end closes; ``None`` if that takes too long."""
    data, end = b"", time.monotonic() + SECONDS
    while True:
        if not select.select([source], [], [], max(end - time.monotonic(), 0))[0]:
            return None
        if not (part := os.read(source, 1 << 16)):
            return data
        data += part
