"""Know what this rank cannot see itself: whether other hosts are there, and how the processes on them fare.

A rank that holds the interpreter for long, or that is stopped, posts no beats. Its kernel still answers the keepalive
packets of a TCP connection on which nothing is ever sent, whatever the process does. So a host that answers none has
lost its network, or is down.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable, Mapping

from autopar.runtime.processes.hosts import own_identity
from autopar.runtime.processes.watch.beat import UNKNOWN, Beat, FollowedRank

NODES = ("GROUP_WORLD_SIZE", "SLURM_NNODES")  # how many nodes a job has, as torchrun and Slurm say it
LOCAL = ("LOCAL_RANK", "SLURM_LOCALID")
# seconds of silence before the first packet, and between two; and so many without an answer: 12 s in all
IDLE, BETWEEN, PACKETS = 4, 2, 4
TRIED = IDLE + BETWEEN * PACKETS  # seconds after which a connection that did not come about counts as lost,
BLOCKED = 5.0  # unless beats came so many seconds after its beginning: then a firewall stands between
LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def has_several_hosts() -> bool:
    """Return whether the launcher has started this job on several nodes."""
    return any(os.environ.get(name, "1") != "1" for name in NODES)


class Listener:
    """A port to which the other hosts connect. It is never read, and only the first rank of a host has one.

    Attributes:
        address: ``host:port``; empty if there is none.
    """

    def __init__(self) -> None:
        self.address = ""
        self._socket: socket.socket | None = None
        if not has_several_hosts() or next((os.environ[name] for name in LOCAL if os.environ.get(name)), "0") != "0":
            return
        try:
            own, family = _own_address()
            self._socket = socket.create_server(("", 0), family=family, backlog=64)
            self.address = f"{own}:{self._socket.getsockname()[1]}"
        except OSError:
            pass  # other hosts then judge by the beats alone

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _own_address() -> tuple[str, socket.AddressFamily]:
    """Return the address at which other hosts reach this one, and its family."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, *_, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    if os.environ.get("RANK") == "0":
        return master, family  # they have reached the store by it
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # it sends nothing, and chooses a route
        return probe.getsockname()[0], family


class Connection:
    """A connection to the listener of another host. It never blocks.

    A link may go down before the connection is there. Then no packet asks the other kernel, and no beat comes either.

    Args:
        address: ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._socket: socket.socket | None = None
        self._began = self._heard = time.monotonic()
        self._was_there, self._is_lost = False, False
        host, _, port = address.rpartition(":")
        try:
            family, *_, found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", BETWEEN), ("TCP_KEEPCNT", PACKETS)):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            self._socket.connect_ex(found)
        except (OSError, AttributeError):  # the system has no such options
            self.close()

    def heard(self) -> None:
        """Note that a beat of the host came: its network is there."""
        self._heard = time.monotonic()

    def is_lost(self) -> bool:
        """Return whether the host does not answer any more. Call it now and then, from one thread."""
        if self._socket is None:
            return self._is_lost
        try:
            if not self._was_there:
                self._socket.getpeername()  # it raises before the connection is there
                self._was_there = True
            if not self._socket.recv(1):
                self.close()  # the process has ended: its beats tell how
        except BlockingIOError:
            pass
        except OSError as error:
            if self._was_there:
                self._is_lost = error.errno in LOST  # the kernel tells it only once
                self.close()
            elif self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                self.close()  # its kernel has answered
            elif time.monotonic() - self._began >= TRIED:
                self._is_lost = self._heard - self._began < BLOCKED
                self.close()
        return self._is_lost

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class OtherHosts:
    """The hosts of the other ranks.

    Attributes:
        own: the launcher's number of this node, and the name of this host.
        listener: what the other hosts connect to, on the first rank of this host.
    """

    def __init__(self) -> None:
        self.own, self.listener = own_identity(), Listener()
        self._connections: dict[tuple[str, str], Connection] = {}

    def follow(self, beat: Beat, is_new: bool) -> None:
        """Connect to the kernel of a host, again if it was lost and has come back. ``is_new``: the beat just came."""
        if not beat.listener or beat.host == self.own:
            return
        before = self._connections.get(beat.host)
        if before is not None and is_new:
            before.heard()
        if before is None or (is_new and before.is_lost()):
            self._connections[beat.host] = Connection(beat.listener)

    def lost(self) -> set[tuple[str, str]]:
        """Return the hosts whose kernels do not answer any more."""
        return {host for host, connection in self._connections.items() if connection.is_lost()}


def take_neighbours(ranks: Mapping[int, FollowedRank]) -> None:
    """Set the state of processes on other hosts to what ranks on their hosts have told."""
    for beat in _beats(ranks.values()):
        for rank, state in beat.neighbours.items():
            if ranks[rank].process == UNKNOWN:
                ranks[rank].process = state


def _beats(ranks: Iterable[FollowedRank]) -> list[Beat]:
    return [rank.beat for rank in ranks if rank.beat is not None]
