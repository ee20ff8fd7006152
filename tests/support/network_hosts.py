"""Hosts that are network namespaces of this machine, joined by a switch: their links are cut, healed and slowed down.

Each host has its own network, host name and process numbers, and one process that keeps these alive. The kernel ends
all processes of a host with that process, and the network with the last of them, so nothing has a name or is left.
Without the rights to make namespaces, hosts are plain processes on the loopback: then links cannot be touched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MARK = "AUTOPAR_TEST_HOST"  # in the environment of each process of a host
NAMES = ("alpha", "beta", "gamma", "delta")
SPACES = ("--net", "--uts", "--pid", "--mount")


@functools.cache
def namespaces_are_allowed() -> bool:
    """Whether this process may make namespaces, links between them and queues on these."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        script = (
            "ip link add bridge type bridge && ip link add left type veth peer name right && ip link set left up && "
            "tc qdisc add dev left root tbf rate 1mbit burst 16kb latency 400ms"
        )
        command = ["unshare", *SPACES, "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    return False


@dataclass
class Host:
    """One host.

    Attributes:
        name: its host name.
        address: the address at which other hosts reach it.
        keeper: the process that keeps the namespaces alive, by its number here; ``None`` on the loopback.
        switch: the process that keeps the switch alive.
        port: the name of its port of the switch.
    """

    name: str
    address: str
    keeper: int | None = None
    switch: int | None = None
    port: str = ""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    # -- processes -------------------------------------------------------------------------------------------------

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        """Environment variables of a process of this host."""
        interface = "lo" if self.keeper is None else "eth0"
        return {**more, MARK: self.mark, "GLOO_SOCKET_IFNAME": interface}

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command, to be run on this host."""
        return [*command] if self.keeper is None else ["nsenter", "--target", str(self.keeper), *SPACES, "--", *command]

    def start(self, command: Sequence[str], output: IO[bytes], **variables: str) -> subprocess.Popen[bytes]:
        """Start a process on this host, in a session of its own."""
        job = subprocess.Popen(
            self.inside(command),
            env={**os.environ, **self.variables(variables)},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.started.append(job)
        return job

    def processes(self) -> dict[int, str]:
        """The processes of this host that are alive, by their numbers here, and what each is: an agent, a rank."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != self.keeper:
                with contextlib.suppress(OSError):
                    if self._has(folder) and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        found[int(folder.name)] = _what(folder)
        return {pid: what for pid, what in found.items() if what != "nsenter"}

    def _has(self, folder: Path) -> bool:
        """Whether a process belongs to this host. ``folder``: in ``/proc``."""
        if self.keeper is not None:
            return os.readlink(folder / "ns" / "pid") == self._space
        return f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")

    @functools.cached_property
    def _space(self) -> str:
        return os.readlink(f"/proc/{self.keeper}/ns/pid")

    def agents(self) -> list[int]:
        return [pid for pid, what in self.processes().items() if what == "torchrun"]

    def ranks(self) -> dict[int, int]:
        """The processes that torchrun has started: rank → its number here."""
        named = {what: pid for pid, what in self.processes().items() if what.startswith("rank ")}
        return dict(sorted((int(what.split()[1]), pid) for what, pid in named.items()))

    # -- faults ----------------------------------------------------------------------------------------------------

    def send(self, number: signal.Signals, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self, at: str = "switch") -> None:
        """Take the link down: at the switch, where no program of the host notices it, or at the host."""
        self._set_link("down", at)

    def heal(self) -> None:
        for at in ("switch", "host"):
            self._set_link("up", at)

    def slow(self, rate: str = "256kbit") -> None:
        """Let packets leave the host, and come to it, at a rate; some wait, and more are dropped."""
        queue = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        self._ip("tc", "qdisc", "replace", "dev", "eth0", *queue)
        self._ip("tc", "qdisc", "replace", "dev", self.port, *queue, on_switch=True)

    def _set_link(self, state: str, at: str) -> None:
        if at == "switch":
            self._ip("ip", "link", "set", self.port, state, on_switch=True)
        else:
            self._ip("ip", "link", "set", "eth0", state)

    def _ip(self, *command: str, on_switch: bool = False) -> None:
        assert self.keeper is not None, "there is no link on the loopback"
        target = self.switch if on_switch else self.keeper
        subprocess.run(["nsenter", "--target", str(target), "--net", "--", *command], check=True, timeout=20)

    def end(self) -> None:
        """Kill all that was started, and wait for it."""
        self.send(signal.SIGKILL, [*self.processes(), *([self.keeper] if self.keeper else [])])
        for job in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGKILL)
            job.wait(20)


@contextlib.contextmanager
def hosts(count: int = 2, *, linked: bool | None = None) -> Iterator[list[Host]]:
    """Some hosts. ``linked``: namespaces with links, or else the loopback; namespaces if they are allowed."""
    if not (namespaces_are_allowed() if linked is None else linked):
        plain = [Host(name, "127.0.0.1") for name in NAMES[:count]]
        try:
            yield plain
        finally:
            for host in plain:
                host.end()
        return
    keepers: list[subprocess.Popen[bytes]] = []
    made: list[Host] = []
    names = "".join(f"10.77.0.{k + 1} {name}\n" for k, name in enumerate(NAMES[:count]))
    try:
        switch = _keeper("switch", names, keepers)
        _run(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _run(switch, "ip", "link", "set", "bridge", "up")
        for k, name in enumerate(NAMES[:count]):
            host = Host(name, f"10.77.0.{k + 1}", _keeper(name, names, keepers), switch, f"port{k}")
            made.append(host)
            _run(switch, "ip", "link", "add", host.port, "type", "veth", "peer", "eth0", "netns", str(host.keeper))
            _run(switch, "ip", "link", "set", host.port, "master", "bridge", "up")
            assert host.keeper is not None
            _run(host.keeper, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            _run(host.keeper, "ip", "link", "set", "eth0", "up")
        yield made
    finally:
        for host in made:
            host.end()
        for keeper in keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.kill()
            keeper.wait(20)


def _keeper(name: str, names: str, keepers: list[subprocess.Popen[bytes]]) -> int:
    """Make namespaces that live as long as a process; return its number here.

    ``names``: those of all hosts, as in ``/etc/hosts``.
    """
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"127.0.0.1 localhost\n{names}")
        file.flush()
        script = (
            f"mount --bind {file.name} /etc/hosts && hostname {name} && ip link set lo up && echo up && "
            "exec cat"  # until this process closes the pipe, also when it is killed
        )
        command = ["unshare", *SPACES, "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        keepers.append(keeper)
        assert keeper.stdout is not None
        with keeper.stdout:
            assert keeper.stdout.readline() == b"up\n", f"there is no host {name}"
    (child,) = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    return int(child)


def _run(target: int, *command: str) -> None:
    subprocess.run(["nsenter", "--target", str(target), "--net", "--", *command], check=True, timeout=20)


@contextlib.contextmanager
def size_limited_folder(kilobytes: int) -> Iterator[Path]:
    """A folder on a file system of its own that has room for so much; it needs the rights to mount."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "autopar-test", folder], check=True)
        try:
            yield Path(folder)
        finally:
            for _ in range(50):
                if subprocess.run(["umount", folder], capture_output=True, check=False).returncode == 0:
                    break
                time.sleep(0.1)


def _what(folder: Path) -> str:
    """Return what a process is. ``folder``: in ``/proc``. Forks of ``forked_agents`` have names of their own."""
    name = (folder / "comm").read_text().strip()
    command = (folder / "cmdline").read_bytes().split(b"\0")
    if name == "torchrun" or name.startswith("rank ") or command[0] == b"nsenter":
        return command[0].decode() if command[0] == b"nsenter" else name
    ranks = [one for one in (folder / "environ").read_bytes().split(b"\0") if one.startswith(b"RANK=")]
    if ranks:
        return f"rank {ranks[0][5:].decode()}"
    return "torchrun" if name == "pt_elastic" or b"torch.distributed.run" in command else name
