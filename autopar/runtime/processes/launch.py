"""Start the ranks of one machine with torch's elastic launcher, and find the store that all ranks share.

The launcher holds a store of its own for the watch: it outlives every rank, so that one message can be shown last,
under whatever the ranks printed while they failed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from autopar.errors import LaunchError
from autopar.runtime.processes.watch.beat import Beat
from autopar.runtime.processes.watch.launcher import STORE_VARIABLE
from autopar.runtime.processes.watch.verdict import LOST
from autopar.runtime.processes.watch.watch import PREFIX
from autopar.runtime.processes.watch.wording import last_seen

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # these end the ranks, and then the launcher
PATIENCE = 5  # seconds that ranks have to end after such a signal, before they are killed


def launch(
    entrypoint: Sequence[str],
    processes: int,
    *,
    endpoint: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command in several processes, the ranks, on this machine. Return when all have ended well.

    Rank 0 writes straight to the terminal; each line of the others has its rank before it.

    Args:
        entrypoint: the command, such as ``[sys.executable, "train.py", "--steps", "100"]``.
        processes: how many.
        endpoint: ``host:port`` for the ranks to meet at; a free port of ``localhost`` unless it is given.
        environment: variables for the ranks, besides those of this process.

    Raises:
        LaunchError: the port is in use; or a rank failed, and all others have been ended; or a signal came.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 1:
        raise LaunchError(f"{processes} processes cannot be started: give 1 or more")
    if endpoint is not None:
        _refuse_used_port(endpoint)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {STORE_VARIABLE: f"localhost:{store.port}", **_defaults(processes), **(environment or {})}
    # torch 2.11 has no such field, and gives them 30 s
    patience: dict[str, Any] = {"shutdown_timeout": PATIENCE} if hasattr(LaunchConfig, "shutdown_timeout") else {}
    with tempfile.TemporaryDirectory(prefix="autopar_") as logs, _environment(variables), _signals_restored(), _quiet():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint or "localhost:0",
            local_addr="localhost",  # otherwise the host's full name, which a laptop may take long to find
            max_restarts=0,
            monitor_interval=0.1,
            **patience,
            signals_to_handle=",".join(SIGNALS),
            log_line_prefix_template="[rank ${rank}] ",
            logs_specs=DefaultLogsSpecs(log_dir=logs, tee={rank: Std.ALL for rank in range(1, processes)}),
        )
        failure = None
        command, *arguments = (part.replace("$", "$$") for part in entrypoint)  # torch fills in ${local_rank}
        try:
            elastic_launch(config, command.replace("$$", "$"))(*arguments)
        except ChildFailedError as error:
            failure = _failed(error, dist.PrefixStore(PREFIX, store))
        except SignalException as error:
            failure = LaunchError(
                f"autopar: {error.sigval.name} came; all ranks have been ended", status=128 + error.sigval
            )
    if failure is not None:
        raise failure


def store_of_job() -> dist.Store:
    """Return the store that all ranks of this job share, for a ``Watch``.

    It is the store of ``launch``, which outlives every rank, or else the store of the process group, however that was
    initialized.
    """
    address = os.environ.get(STORE_VARIABLE)
    if address:
        host, _, port = address.rpartition(":")
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    if not dist.is_initialized():
        raise LaunchError("this process has no process group\n  call torch.distributed.init_process_group first")
    from autopar.torch_private import store_of_processes

    return store_of_processes()


def _failed(error: ChildFailedError, store: dist.Store) -> LaunchError:
    """Return the error of a failed job: the verdict of the ranks' watch, or else which rank ended first, and how."""
    rank, first = error.get_first_failure()
    verdict = json.loads(store.get("done")) if store.check(["done"]) else None
    if verdict is not None:
        rank = verdict["ranks"][0]
        first = error.failures.get(rank, first)
    status = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    name = first.signal_name()
    ending = f"was killed by {name}" if first.exitcode < 0 else f"exited with status {first.exitcode}"
    if verdict is not None:  # the other ranks' verdict: they did not see how this rank ended
        text = (
            verdict["text"].replace(f"rank {rank} {LOST}", f"rank {rank} {ending}")
            if first.exitcode < 0
            else verdict["text"]
        )
        return LaunchError(text, rank=rank, status=status)
    place = ""
    if store.check([f"beat/{rank}"]):
        place = f"; {last_seen(Beat.load(store.get(f'beat/{rank}')))}"
    remedy = "\n  if memory ran out, the kernel killed it: see dmesg" if name == "SIGKILL" else ""
    return LaunchError(f"autopar: rank {rank} {ending}{place}{remedy}", rank=rank, status=status)


def _refuse_used_port(endpoint: str) -> None:
    """Raise ``LaunchError`` if the port is in use: torch would join whatever listens there."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise LaunchError(f"the endpoint {endpoint!r} is not host:port, such as localhost:29500")
    try:
        with socket.create_server(
            (host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"nothing can listen on {endpoint} of this machine: {error.strerror or error}") from None
    raise LaunchError(
        f"port {port} is in use, perhaps by another run; nothing was started\n  give another port, or no endpoint: a "
        f"free port is found then"
    )


def _defaults(processes: int) -> dict[str, str]:
    """Return variables for the ranks, unless the user has set them: a share of the cores, and unbuffered output."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {"OMP_NUM_THREADS": str(max(1, cores // processes)), "PYTHONUNBUFFERED": "1"}
    return {name: os.environ.get(name, value) for name, value in variables.items()}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process for a while, because the ranks inherit its environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore the signal handlers at the end, because torch's launcher leaves its own behind."""
    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.getsignal(s) for s in map(signal.Signals.__getitem__, SIGNALS)} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of torch's launcher, unless ``LOGLEVEL`` is set, and print the ranks' lines one by one."""
    with contextlib.suppress(AttributeError, ValueError):  # not a file
        cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    parts = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(parts)]
    before = [logger.level for logger in loggers]
    if "LOGLEVEL" not in os.environ:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # torch leaves files open that ranks wrote to
            yield
            gc.collect()
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
