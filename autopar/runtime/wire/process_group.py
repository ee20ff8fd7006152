"""Wrap a gloo process group, so that data really travels and each operation ends at its time on the emulated wire."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed

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
        settings: latency, bandwidth and kind of links, as given to ``emulate``.
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
        self._machine = machine_of(settings["latency"], settings["bandwidth"])
        self._description = ""
        scope = name if settings["links"] == "axis" else ""
        self._out, self._in = (
            tuple(key_of("link", scope, rank, direction) for rank in self._ranks) for direction in ("out", "in")
        )
        self._numbers: Iterator[int] = itertools.count()  # of collectives
        self._messages: Counter[tuple[int, int, int]] = Counter()  # sender, receiver, tag → how many so far
        self._order = InOrder()
        WIRE_GROUPS[name] = self

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
        size, seconds = charged(name, args, len(self._ranks), self._machine)
        return self._issue(name, size, seconds, lambda: carry(self._inner, name, args, kwargs))

    def _issue(self, name: str, size: int, seconds: float, start: Callable[[], Carried]) -> CollectiveWork:
        key = ("collective", self._name, next(self._numbers))
        transfer = self._transfer(name, size, seconds, key, self._ranks, (*self._out, *self._in))
        transfer.issue()
        return CollectiveWork(start(), transfer, self._order)

    def start_scatter(self, rows: torch.Tensor, op: str) -> torch.Tensor:
        """Start to reduce ``rows``, ``[ranks, …]``, in place; wait for them as for a functional collective.

        It is charged as the reduce-scatter that it stands for, of which each rank reads one row.
        """
        size, seconds = charged("reduce_scatter", (None, rows), len(self._ranks), self._machine)
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
        size, seconds = charged(name, (tensors,), 2, self._machine)
        number = self._messages[sender, receiver, tag]
        self._messages[sender, receiver, tag] += 1
        key = ("message", self._name, sender, receiver, tag, number)
        members, links = (self._ranks[sender], self._ranks[receiver]), (self._out[sender], self._in[receiver])
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
