"""Jobs on several hosts: torchrun on each, two ranks a host, and how all has ended."""

from __future__ import annotations

import atexit
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from host_ranks import read_losses
from network_hosts import Host

SUPPORT = Path(__file__).parent
SCRIPT = SUPPORT / "host_ranks.py"
RANKS, PER_HOST = 4, 2
START = 120.0  # seconds that a job may take until its first step, on a machine that others use too


class Forks:
    """The server of ``forked_agents``: it starts torchrun on hosts as forks."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, str(SUPPORT / "forked_agents.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answers: dict[int, queue.Queue[int]] = {}
        self.codes: dict[int, int] = {}
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line and json.loads(line)["ready"], "no step was captured"
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.server.stdout is not None
        for line in self.server.stdout:
            row = json.loads(line)
            if "pid" in row:
                self.answers[row["id"]].put(row["pid"])
            else:
                self.codes[row["id"]] = row["ended"]

    def start(self, keeper: int | None, arguments: Sequence[str], output: Path, environment: dict[str, str]) -> int:
        """Start an agent; returns its number for ``codes``."""
        number = len(self.answers)
        self.answers[number] = queue.Queue()
        job = {
            "id": number,
            "keeper": keeper,
            "arguments": [*arguments],
            "output": str(output),
            "environment": environment,
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        self.answers[number].get(timeout=60)
        return number

    def end(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.kill()
        self.server.wait(20)


_forks: list[Forks] = []


def forks() -> Forks:
    """The server of this process; it is started when it is first needed."""
    if not _forks:
        _forks.append(Forks())
        atexit.register(_forks[0].end)
    return _forks[0]


class HostJob:
    """A job of ``host_ranks`` on hosts.

    Args:
        hosts: the first has the ranks 0 and 1, and the store.
        folder: for losses and what is printed; one for each start of a job.
        forked: whether agents and ranks are forks, or else commands like those of a user.
        port: at which the agents meet, on the first host.
        variables: environment variables of a host's processes, by its name.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        *arguments: str,
        forked: bool = True,
        options: Sequence[str] = (),
        port: int = 29500,
        variables: dict[str, dict[str, str]] | None = None,
    ) -> None:
        self.hosts, self.folder, self.forked = [*hosts], folder, forked and hosts[0].keeper is not None
        folder.mkdir(parents=True, exist_ok=True)
        self.agents: dict[str, Callable[[], int | None]] = {}
        for k, host in enumerate(hosts):
            given = [
                *("--nnodes", str(len(hosts)), "--nproc-per-node", str(PER_HOST)),
                *("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{hosts[0].address}:{port}"),
                *("--rdzv-conf", f"is_host={int(k == 0)}", "--local-addr", host.address),
                *options,
                str(SCRIPT),
                str(folder),
                *arguments,
            ]
            own = {"OMP_NUM_THREADS": "1", **(variables or {}).get(host.name, {})}
            self._start(host, given, own)

    def _start(self, host: Host, arguments: Sequence[str], own: dict[str, str]) -> None:
        output = self.folder / f"{host.name}.out"
        if self.forked:
            number = forks().start(host.keeper, arguments, output, host.variables(own))
            self.agents[host.name] = lambda: forks().codes.get(number)
        else:
            with output.open("ab") as file:
                command = [sys.executable, "-m", "torch.distributed.run", *arguments]
                self.agents[host.name] = host.start(command, file, **own).poll

    def printed(self, host: Host) -> str:
        path = self.folder / f"{host.name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def messages(self, host: Host) -> list[str]:
        """What autopar has said on a host, without the lines below each first line."""
        return [line for line in self.printed(host).splitlines() if line.startswith("autopar: ")]

    def steps(self) -> int:
        """The number of steps that all ranks have taken since they were started."""
        return min(len(read_losses(self.folder, rank)) for rank in range(RANKS))

    def wait_for_steps(self, count: int, seconds: float = START) -> None:
        begun = time.monotonic()
        while self.steps() < count:
            ended = {name: code() for name, code in self.agents.items() if code() is not None}
            if ended or time.monotonic() - begun > seconds:
                told = "".join(f"\n{host.name}:\n{self.printed(host)[-3000:]}" for host in self.hosts)
                raise AssertionError(f"after {self.steps()} steps {ended or 'nothing more happens'}{told}")
            time.sleep(0.02)

    def seconds_until_end(self, limit: float, hosts: Sequence[Host] | None = None) -> dict[str, float]:
        """How long each host still had processes; a host that has some after the limit is left out."""
        begun, found = time.monotonic(), dict[str, float]()
        watched = self.hosts if hosts is None else hosts
        while len(found) < len(watched) and time.monotonic() - begun < limit:
            for host in watched:
                if host.name not in found and not host.processes():
                    found[host.name] = time.monotonic() - begun
            time.sleep(0.1)
        return found

    def codes(self) -> dict[str, int | None]:
        """How the agents have ended, once all processes have: their parent may read it a moment later.

        On a busy machine a host may have had no process yet when it was asked for them.
        """
        begun = time.monotonic()
        while None in (codes := {name: code() for name, code in self.agents.items()}).values():
            if time.monotonic() - begun > 60:
                break
            time.sleep(0.02)
        return codes

    def losses(self, rank: int = 0) -> dict[int, float]:
        return {number: loss for number, loss, _ in read_losses(self.folder, rank)}

    def end(self) -> None:
        """Kill what is left."""
        for host in self.hosts:
            host.send(signal.SIGKILL, [*host.processes()])


def described(job: Any) -> str:
    """What all hosts of a job have printed, for the message of a test."""
    return "".join(f"\n== {host.name}\n{job.printed(host)[-4000:]}" for host in job.hosts)
