"""Run torchrun on hosts of ``network_hosts`` without the seconds that imports take: agents and ranks are forked.

Run as a script it serves agents. torch and autopar are imported, and a step is captured, once. An agent is a fork that
enters the namespaces of its host and calls the ``main`` of torchrun; its ranks are forks that run the script. Only the
imports are missing: processes, signals, exit statuses and messages are those of torchrun.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from forks import MAY_CAPTURE_BEFORE
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

PR_SET_NAME = 15
SPACES = ("net", "uts", "mnt", "pid")


class ForkedRank:
    """A fork in the place of ``subprocess.Popen``: of it, what torchrun calls."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun's handlers end at an exec
                signal.signal(number, signal.SIG_DFL)
            named(f"rank {env['RANK']}")
            os.environ.update(env)
            _, _, script, *arguments = args  # python -u script
            sys.argv[:] = [script, *arguments]
            _end_like_a_script(lambda: runpy.run_path(script, run_name="__main__"))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        begun = time.monotonic()
        while self.poll() is None:
            if time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _end_like_a_script(main: Any) -> NoReturn:
    """Call a function as if it were the whole program of this process."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def named(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def enter(keeper: int) -> None:
    """Enter the namespaces of a host. Only the forks of this process have its process numbers."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{keeper}/ns/{space}", os.O_RDONLY) for space in SPACES]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)


def serve(job: dict[str, Any]) -> NoReturn:
    """Run one agent in a fork of this process, and answer how it ended."""
    folder = os.getcwd()
    if job["keeper"] is not None:
        enter(job["keeper"])
        os.chdir(folder)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ.update(job["environment"])
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, number)
        subprocess_handler.Popen = ForkedRank  # type: ignore[misc, assignment]
        _end_like_a_script(lambda: torchrun.main(job["arguments"]))
    _answer({"id": job["id"], "pid": pid})
    _, status = os.waitpid(pid, 0)
    _answer({"id": job["id"], "ended": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def _answer(row: dict[str, Any]) -> None:
    os.write(1, (json.dumps(row) + "\n").encode())


def warm_up() -> None:
    """Import and build what a rank needs, without a thread that a fork would miss."""
    import host_ranks

    import autopar
    import autopar.runtime.process_step
    import autopar.runtime.processes.job
    import autopar.runtime.processes.watch
    from autopar.checkpoint import loading, saving  # noqa: F401

    torch.set_num_threads(1)
    if not MAY_CAPTURE_BEFORE:
        return
    parallel = autopar.parallelize(host_ranks.made(), autopar.Mesh(dp=2, tp=2), host_ranks.PLAN)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=0.01))
    step.simulate(host_ranks.batch(0))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        warm_up()
    except Exception:
        traceback.print_exc()
        raise
    gc.collect()
    gc.freeze()
    _answer({"ready": True})
    for line in sys.stdin:
        sys.stdout.flush()
        if os.fork() == 0:
            serve(json.loads(line))
