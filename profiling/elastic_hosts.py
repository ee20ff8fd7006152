"""Hosts of a job under torchrun on this machine: agents that a benchmark starts, and kills with their ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LIMIT = 300.0  # seconds until a job is given up


class Host:
    """An agent of torchrun, whose rendezvous is on a port of this machine, and its ranks."""

    def __init__(self, script: Path, arguments: list[str], port: int, address: int, conf: str, log: Path) -> None:
        self.log = log
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2",
            "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
            "--rdzv-id", "bench", "--rdzv-conf", f"is_host=0{',' * bool(conf)}{conf}",
            "--local-addr", f"127.0.0.{address}", str(script),
            *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with log.open("ab") as file:
            self.agent = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """The processes that the agent has started."""
        found = []
        for task in Path(f"/proc/{self.agent.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in task.read_text().split()]
        return found

    def kill(self) -> None:
        for pid in [self.agent.pid, *self.ranks()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()


@contextlib.contextmanager
def two_hosts(script: Path, arguments: list[str], conf: str, folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts, whose store is in this process: either can be lost. They are killed at the end."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    hosts = [Host(script, arguments, store.port, k, conf, folder / f"host{k}.txt") for k in (1, 2)]
    try:
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.kill()


def wait(condition: Callable[[], bool], host: Host) -> float:
    """The time when a condition came to hold."""
    limit = time.time() + LIMIT
    while not condition():
        if time.time() > limit or host.agent.poll() is not None:
            raise RuntimeError(f"the host ended, or nothing came:\n{host.log.read_text()[-4000:]}")
        time.sleep(0.005)
    return time.time()
