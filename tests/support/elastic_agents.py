"""Hosts of a job: agents of torchrun on this machine, which a test kills with their ranks, and starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import distributed
from train_jobs import _children

LIMIT = 240.0  # seconds until a job is given up
# noticed within 2 s, and nobody waits for a host that is gone: the page says what these are
QUICK = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=1,join_timeout=60"


class Host:
    """An agent of torchrun with its ranks. What they print goes to one file for each host."""

    def __init__(self, job: ElasticJob, name: str, log: Path) -> None:
        self.log = log
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", job.nodes, "--nproc-per-node", str(job.ranks),
            "--max-restarts", str(job.restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{job.port}",
            "--rdzv-id", job.id, "--rdzv-conf", QUICK, "--local-addr", name, *job.command,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **job.environment,
        }
        with log.open("ab") as file:
            self.agent = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text()

    def running(self) -> bool:
        return self.agent.poll() is None

    def kill(self) -> None:
        """End the agent and its ranks at once, as when the power fails."""
        for pid in [self.agent.pid, *_children(self.agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()


class ElasticJob:
    """A job on hosts that come and go. Its rendezvous is in the store of this process, so any host may be lost."""

    def __init__(
        self, folder: Path, *command: str, nodes: str = "1:2", ranks: int = 2, restarts: int = 5, **environment: str
    ) -> None:
        self.folder, self.command = folder, command
        self.nodes, self.ranks, self.restarts, self.environment = nodes, ranks, restarts, environment
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
                raise AssertionError(f"never: {what}\n{self.text()[-12000:]}")
            time.sleep(0.01)

    def end(self) -> list[int]:
        """Wait for all hosts that were not killed, and return the statuses of all."""
        self.wait(lambda: not any(host.running() for host in self.hosts), "the end of the job")
        return [host.agent.wait() for host in self.hosts]

    def close(self) -> None:
        for host in self.hosts:
            host.kill()


@contextlib.contextmanager
def elastic_job(folder: Path, *command: str, **options: object) -> Iterator[ElasticJob]:
    job = ElasticJob(folder, *command, **options)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        job.close()
