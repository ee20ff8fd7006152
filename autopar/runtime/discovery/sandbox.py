"""Run a function in a sandbox process, so that nothing it does affects this process.

An op that runs on operands for which it was not tested may write past their ends, never return, or keep state.
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
    """A sandbox ended without a result; the message is the reason."""


class CrashError(SandboxError):
    """The function ended the process of the sandbox."""


def isolated(function: Callable[[], Any]) -> Any:
    """Return the result of a function, which must be plain data, from a process of its own.

    The function sees this process's state, and cannot change it. The process is a fork with one thread, like a worker
    of a ``DataLoader``; the function must not use an accelerator.

    Raises:
        SandboxError: the process did not end in time, or cannot be forked on this system.
    """
    if sys.platform != "linux":
        raise SandboxError("ops are run in a sandbox on Linux alone")
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
        child = os.fork()
    if not child:
        _serve(function, theirs)
    os.close(theirs)
    try:
        data = _received(ours)
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it has no work left
        status = 0
        with contextlib.suppress(ChildProcessError):  # other code has waited for it
            _, status = os.waitpid(child, 0)
    if data is None:
        raise SandboxError(f"running it on pieces did not end in {SECONDS} seconds")
    if not data:
        code = os.waitstatus_to_exitcode(status)
        raise CrashError(
            f"running it on pieces ended the process{f' ({signal.Signals(-code).name})' if code < 0 else ''}"
        )
    return pickle.loads(data)


def _serve(function: Callable[[], Any], out: int) -> None:
    """Run the function in the child, and exit without the parent's exit handlers."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        # the parent's may be locked by a thread that the child does not have
        sys.stdout = sys.stderr = os.fdopen(null, "w")
        torch.set_num_threads(1)
        data = pickle.dumps(function())
        while data:
            data = data[os.write(out, data) :]
    finally:
        os._exit(0)


def _received(source: int) -> bytes | None:
    """Return all bytes until the other end closes; ``None`` if that takes too long."""
    data, end = b"", time.monotonic() + SECONDS
    while True:
        if not select.select([source], [], [], max(end - time.monotonic(), 0))[0]:
            return None
        if not (part := os.read(source, 1 << 16)):
            return data
        data += part
