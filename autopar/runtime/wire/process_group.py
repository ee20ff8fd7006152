"""Wrap a gloo process group, so that data really travels and each operation ends at its time on the emulated wire."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed

from autopar.costs.machine import Machine
from autopar.runtime.wire.carry import OLDER, Carried, carry
from autopar.runtime.wire.clock import now
from autopar.runtime.wire.link_table import key_of
from autopar.runtime.wire.prices import CHARGES, charged, machine_of
from autopar.runtime.wire.transfer import Medium, Transfer
from autopar.runtime.wire.wire_groups import BACKEND, WIRE_GROUPS
from autopar.runtime.wire.work import CollectiveWork, InOrder, MessageWork
from autopar.torch_private import all_reduce_options, register_work

MESSAGES = ("send", "recv", "recv_anysource")


class WireGroup(distributed.ProcessGroup):
    """A process group on the emulated wire.

    torch calls the methods of ``CHARGES``; each calls the same method of a gloo group, and returns a work that ends at
    the transfer's deadline. All members issue collectives in one order, as on gloo.

    Args:
        inner: the gloo group.
        ranks: the members, by their ranks in the world.
        name: of the group.
        settings: latency, bandwidth and kind of links, as given to ``emulate``; also the ranks per host and the latency
            and bandwidth between hosts, if it has several.
        timeout: of the group.
        medium: the table and the counts that all groups of this process share.
    """

    def __init__(
        self, inner: distributed.ProcessGroup, ranks: Sequence[int], name: str, settings: dict[str, Any],
        timeout: timedelta, medium: Medium,
    ) -> None:  # fmt: skip
        cast(Any, super()).__init__(inner.rank(), inner.size())  # torch then calls the methods of this class
        self._inner, self._ranks, self._name = inner, tuple(ranks), name
        self._timeout, self._medium = timeout.total_seconds(), medium
        self._settings, self._description = settings, ""
        self._numbers: Iterator[int] = itertools.count()  # of collectives
        self._messages: Counter[tuple[int, int, int]] = Counter()  # sender, receiver, tag → how many so far
        self._order = InOrder()
        WIRE_GROUPS[name] = self

    # -- links

    def _between(self, members: Sequence[int]) -> bool:
        """Return whether some members of a transfer are on different emulated hosts."""
        per_host = self._settings.get("ranks_per_host")
        return per_host is not None and len({rank // per_host for rank in members}) > 1

    def _machine(self, members: Sequence[int]) -> Machine:
        """Return the machine that prices a transfer: its slowest links count."""
        if self._between(members):
            return machine_of(*self._settings["between"])
        return machine_of(self._settings["latency"], self._settings["bandwidth"])

    def _links(self, direction: str, ranks: Sequence[int], members: Sequence[int]) -> tuple[int, ...]:
        """Return the keys of the links of some ranks, out or in, that a transfer among its members occupies.

        A rank has one link to its host, and another to other hosts, which do not wait for each other.
        """
        scope = self._name if self._settings["links"] == "axis" else ""
        kind = "between" if self._between(members) else "link"
        return tuple([key_of(kind, scope, rank, direction) for rank in ranks])

    # -- the names and the backend of a group, which torch asks for

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        WIRE_GROUPS[name] = WIRE_GROUPS.pop(self._name, self)
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner._get_backend(device)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run gloo's barrier that names missing ranks. It is not charged."""
        limit = timedelta(seconds=self._timeout) if timeout is None else timeout
        self._get_backend(torch.device("cpu")).monitored_barrier(limit, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self._inner.set_timeout(timeout)

    def abort(self) -> None:
        self._inner.abort()
        self._forget()

    def shutdown(self) -> None:
        self._inner.shutdown()
        self._forget()

    def _forget(self) -> None:
        WIRE_GROUPS.pop(self._name, None)

    # -- collectives

    def _collective(self, name: str, *args: Any, **kwargs: Any) -> CollectiveWork:
        """Issue a collective, ``name`` of ``CHARGES``, with the arguments of ProcessGroup's method."""
        size, seconds = charged(name, args, len(self._ranks), self._machine(self._ranks))
        return self._issue(name, size, seconds, lambda: carry(self._inner, name, args, kwargs))

    def _issue(self, name: str, size: int, seconds: float, start: Callable[[], Carried]) -> CollectiveWork:
        key = ("collective", self._name, next(self._numbers))
        links = *self._links("out", self._ranks, self._ranks), *self._links("in", self._ranks, self._ranks)
        transfer = self._transfer(name, size, seconds, key, self._ranks, links)
        transfer.issue()
        return CollectiveWork(start(), transfer, self._order)

    def start_scatter(self, rows: torch.Tensor, op: str) -> torch.Tensor:
        """Start to reduce ``rows``, ``[ranks, …]``, in place; wait for them as for a functional collective.

        It is charged as the reduce-scatter that it stands for, of which each rank reads one row.
        """
        size, seconds = charged("reduce_scatter", (None, rows), len(self._ranks), self._machine(self._ranks))
        options = all_reduce_options(op)
        register_work(
            rows,
            self._issue("reduce_scatter", size, seconds, lambda: Carried([self._inner.allreduce([rows], options)])),
        )
        return rows

    # -- messages

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> MessageWork:
        transfer = self._message("send", tensors, self.rank(), dstRank, tag)
        transfer.issue()
        return MessageWork(self._inner.send(tensors, dstRank, tag), transfer)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> MessageWork:
        transfer = self._message("recv", tensors, srcRank, self.rank(), tag)
        transfer.issue()
        return MessageWork(self._inner.recv(tensors, srcRank, tag), transfer)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> MessageWork:
        issued = now()

        def found(sender: int) -> Transfer:
            transfer = self._message("recv_anysource", tensors, sender, self.rank(), tag)
            transfer.issue(issued)
            return transfer

        return MessageWork(self._inner.recv_anysource(tensors, tag), None, found)

    def _message(self, name: str, tensors: list[torch.Tensor], sender: int, receiver: int, tag: int) -> Transfer:
        """Return the transfer of a message. Messages with one tag between two ranks are first in, first out."""
        members = self._ranks[sender], self._ranks[receiver]
        size, seconds = charged(name, (tensors,), 2, self._machine(members))
        number = self._messages[sender, receiver, tag]
        self._messages[sender, receiver, tag] += 1
        key = ("message", self._name, sender, receiver, tag, number)
        links = *self._links("out", members[:1], members), *self._links("in", members[1:], members)
        return self._transfer(name, size, seconds, key, members, links)

    def _transfer(
        self, name: str, size: int, seconds: float, key: tuple[Any, ...], members: Sequence[int], links: Sequence[int]
    ) -> Transfer:
        return Transfer(
            key_of(*key), members, links, self._name, name, size, seconds, self._timeout, self._medium
        )  # fmt: skip


def _collective(name: str) -> Callable[..., CollectiveWork]:
    def method(self: WireGroup, *args: Any, **kwargs: Any) -> CollectiveWork:
        return self._collective(name, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"Issue ProcessGroup's ``{name}``."
    return method


for _name in CHARGES:
    if _name not in MESSAGES:
        setattr(WireGroup, _name, _collective(_name))
for _older, _newer in OLDER.items():
    setattr(WireGroup, _older, getattr(WireGroup, _newer))
