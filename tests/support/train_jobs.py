"""Start jobs of ``autopar train`` on two ranks: forked from a process that has imported all, or by the command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from processes import forked

LIMIT = 240  # seconds for a job
RANKS = 2


class Forked:
    """The ranks of a job that stands already: no launcher is above them, and what has become of one is told by the
    other."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        self.log = log
        self.ranks = [forked(_rank, rank, port, arguments, str(log)) for rank in range(RANKS)]

    def running(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks)

    def kill(self, everything: bool) -> None:
        for rank in self.ranks[0 if everything else 1 :]:
            rank.kill()

    def end(self) -> tuple[bool, str]:
        """Whether all went well, and what was printed."""
        for rank in self.ranks:
            rank.join(LIMIT)
            rank.kill()  # it may not have ended
            rank.join()
        return all(rank.exitcode == 0 for rank in self.ranks), self.log.read_text()


def _rank(rank: int, port: int, arguments: list[str], log: str) -> None:
    from autopar.cli.app import app

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    app(["train", *arguments])


class Command:
    """The command, which launches the ranks, and tells what has become of them."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.job = subprocess.Popen(
                [sys.executable, "-m", "autopar", "train", *arguments], stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def running(self) -> bool:
        return self.job.poll() is None

    def kill(self, everything: bool) -> None:
        pids = [one for one in _children(self.job.pid) if b"RANK=" in _read(Path(f"/proc/{one}/environ"))]
        assert len(pids) == RANKS
        for pid in [self.job.pid, *pids] if everything else pids[1:]:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> tuple[bool, str]:
        try:
            return self.job.wait(LIMIT) == 0, self.log.read_text()
        finally:
            self.job.kill()


def wait_for_line(job: Forked | Command, start: str) -> None:
    """Wait until the job prints a line that starts so."""
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit and job.running():
        if job.log.exists() and any(line.startswith(start) for line in job.log.read_text().splitlines()):
            return
        time.sleep(0.01)
    raise AssertionError(f"no line {start}\n{job.end()[1][-4000:]}")


def _children(pid: int) -> list[int]:
    """The processes that it has started, and theirs."""
    try:
        own = [
            int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended
        return []
    return [found for one in own for found in (one, *_children(one))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
