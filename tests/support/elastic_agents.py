"""Hosts of a job: agents of torchrun on this machine, which a test kills with their ranks, and starts again.

Agents and ranks are forked from a process that has imported everything, so that a start takes no time to import. An
agent starts stubs (``elastic_stub``), for each of which this process forks the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from processes import forked
from torch import distributed

LIMIT = 240.0  # seconds until a job is given up
STUB = Path(__file__).with_name("elastic_stub.py")
# a lost host is given up after 4 s, and nobody waits for others: the page says what these are
QUICK = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1,join_timeout=60"
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Host:
    """An agent of torchrun with its ranks. What they print goes to one file for each host."""

    def __init__(self, job: ElasticJob, name: str, log: Path) -> None:
        self.log, self.ranks, self._lock = log, list[BaseProcess](), threading.Lock()
        self._is_killed = False
        path = str(log.with_suffix(".socket"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        arguments = [
            "--nnodes", job.nodes, "--nproc-per-node", str(job.count), "--max-restarts", "5", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"localhost:{job.port}", "--rdzv-id", job.id, "--rdzv-conf", QUICK, "--local-addr", name,
            "--no-python", sys.executable, str(STUB), path, *job.command,
        ]  # fmt: skip
        self.agent = forked(_agent, arguments, str(log))

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def running(self) -> bool:
        return self.agent.exitcode is None

    def kill(self) -> None:
        """End the agent and its ranks at once, as when the power fails."""
        with self._lock:
            self._is_killed = True
            for process in (self.agent, *self.ranks):
                process.kill()
        self.agent.join()
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the host was killed
            while True:
                stub, _ = self._server.accept()
                threading.Thread(target=self._run, args=[stub], daemon=True).start()

    def _run(self, stub: socket.socket) -> None:
        """Fork a rank for a stub, and tell the stub how it has ended."""
        with stub, stub.makefile("rw") as lines:
            launcher, environment, command = json.loads(lines.readline())
            with self._lock:
                if self._is_killed:
                    return
                rank = forked(_rank, launcher, environment, command, str(self.log))
                self.ranks.append(rank)
            while rank.sentinel not in connection.wait([rank.sentinel, stub]):
                if not stub.recv(16):  # the stub was killed
                    rank.kill()
                    break
                rank.terminate()
            rank.join()
            with contextlib.suppress(OSError):
                lines.write(f"{rank.exitcode}\n")


def _printing_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)


def _agent(arguments: list[str], log: str) -> None:
    from torch.distributed import run

    _printing_to(log)
    os.environ |= VARIABLES
    run.main(arguments)


def _rank(launcher: int, environment: dict[str, str], command: list[str], log: str) -> None:
    _printing_to(log)
    os.getppid = lambda: launcher  # who forked this rank is none: the watch would end it as a stuck launcher
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


class ElasticJob:
    """A job on hosts that come and go. Its rendezvous is in the store of this process, so any host may be lost."""

    def __init__(self, folder: Path, *command: str, nodes: str = "1:2", count: int = 2) -> None:
        self.folder, self.command, self.nodes, self.count = folder, command, nodes, count
        self._store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.port, self.id, self.hosts = self._store.port, uuid.uuid4().hex, list[Host]()

    def start(self, address: int = 1) -> Host:
        """Start a host. Hosts have their ranks in the order of their addresses, 127.0.0.1 first."""
        host = Host(self, f"127.0.0.{address}", self.folder / f"host{len(self.hosts)}.txt")
        self.hosts.append(host)
        return host

    def text(self) -> str:
        """What all hosts have printed."""
        return "\n".join(f"== host {k}\n{host.text()}" for k, host in enumerate(self.hosts))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > limit or not any(host.running() for host in self.hosts):
                time.sleep(0.2)
                if condition():
                    return
                codes = [host.agent.exitcode for host in self.hosts]
                raise AssertionError(f"never: {what}; exit codes of the launchers: {codes}\n{self.text()[-12000:]}")
            time.sleep(0.01)

    def end(self) -> list[int | None]:
        """Wait for all hosts that were not killed, and return the statuses of all."""
        self.wait(lambda: not any(host.running() for host in self.hosts), "the end of the job")
        return [host.agent.exitcode for host in self.hosts]

    def close(self) -> None:
        for host in self.hosts:
            host.kill()


@contextlib.contextmanager
def elastic_job(folder: Path, *command: str) -> Iterator[ElasticJob]:
    job = ElasticJob(folder, *command)
    try:
        yield job
    finally:
        job.close()
