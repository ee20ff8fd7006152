"""Streams of CUDA and process groups of NCCL, on a CPU: what is enqueued is recorded, timed, and searched for races.

A stream is a queue. What runs on it comes after all that was enqueued there before, and after the events that it waits
for: this is a vector clock. Two accesses to one memory of which one writes, and neither comes after the other, are a
race. The next kernel of a stream reuses the memory of that stream that is free: so all that other streams do with it
has to come before, unless ``record_stream`` said so. Ops run at once, in the order in which they are issued, so that
numbers are right.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.lowering import bucket_collectives, collectives, side_streams
from autopar.runtime.lowering.side_streams import SideStreams

Clock = Mapping[str, int]  # stream → how many of its kernels have run


@dataclass
class Event:
    clock: Clock
    time: float


@dataclass(eq=False)
class Stream:
    cuda: Cuda
    name: str
    clock: Counter[str] = field(default_factory=Counter)
    time: float = 0.0
    freed: list[Storage] = field(default_factory=list)

    def record_event(self) -> Event:
        self.cuda.log.append(f"record on {self.name}")
        return self._now()

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append(f"{self.name} waits for an event")
        self._after(event)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")
        self._after(other._now())

    def _now(self) -> Event:
        return Event(Counter(self.clock), self.time)

    def _after(self, event: Event) -> None:
        self.clock |= event.clock
        self.time = max(self.time, event.time)

    def run(self, name: str, reads: set[int], writes: set[int], line: str = "") -> None:
        for storage in self.freed:
            storage.check_reused()
        self.freed.clear()
        self.clock[self.name] += 1
        self.time += self.cuda.seconds.get(name, 0.0)
        for storage in reads | writes:
            self.cuda.storages[storage].access(self, name, storage in writes)
        self.cuda.kernels.append((self.name, name, line))


@dataclass
class Storage:
    """Memory in use: its stream, all accesses to it, and the streams that ``record_stream`` named."""

    home: Stream
    accesses: list[tuple[Stream, int, str, bool]] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    tensors: int = 0

    def access(self, stream: Stream, name: str, writes: bool) -> None:
        for other, number, before, wrote in self.accesses:
            if (writes or wrote) and stream.clock[other.name] < number:
                stream.cuda.races.append(f"{name} on {stream.name} beside {before} on {other.name}")
        self.accesses.append((stream, stream.clock[stream.name], name, writes))

    def check_reused(self) -> None:
        """Called when its stream may use it for something else."""
        for other, number, name, _ in self.accesses:
            if other.name not in self.recorded and self.home.clock[other.name] < number:
                self.home.cuda.races.append(f"memory of {self.home.name} is reused beside {name} on {other.name}")


class Cuda:
    """Stands for ``torch.cuda`` and for the collectives of NCCL, on one rank that all others equal.

    Attributes:
        log: records, waits, starts and waits for collectives, in the order in which they are issued.
        kernels: stream, name and line of the generated code of each kernel.
        races: what may run at the same time, and must not.
        begins: name of the line that starts a collective → the calling stream's kernels that it comes after.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = seconds or {}
        self.log: list[str] = []
        self.kernels: list[tuple[str, str, str]] = []
        self.races: list[str] = []
        self.begins: dict[str, int] = {}
        self.storages: dict[int, Storage] = {}
        self.streams = [Stream(self, "compute")]
        self.current = self.streams[0]
        self.groups: dict[str, Stream] = {}
        self.works: dict[int, tuple[Event, list[torch.Tensor]]] = {}

    # -- torch.cuda ----------------------------------------------------------------------------------------------------

    def Stream(self) -> Stream:
        self.streams.append(Stream(self, f"side {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.storages[id_of(tensor)].recorded.add(stream.name)

    @property
    def makespan(self) -> float:
        return max(stream.time for stream in (*self.streams, *self.groups.values()))

    # -- memory --------------------------------------------------------------------------------------------------------

    def know(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, which is in use until its last tensor has gone."""
        number = id_of(tensor)
        storage = self.storages.setdefault(number, Storage(self.current))
        storage.tensors += 1
        weakref.finalize(tensor, self.forget, number)
        return number

    def forget(self, number: int) -> None:
        storage = self.storages[number]
        storage.tensors -= 1
        if not storage.tensors:
            storage.home.freed.append(self.storages.pop(number))

    # -- NCCL ----------------------------------------------------------------------------------------------------------

    def collective(self, group: str, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Run on the stream of the group, behind the calling stream; keep the memory until something waits."""
        stream = self.groups.setdefault(group, Stream(self, f"group {group}"))
        stream._after(self.current._now())
        line = line_here()
        self.begins[line] = stream.clock["compute"]
        reads, writes = {self.know(sent)}, {self.know(received)}
        stream.run("collective", reads, writes, line)
        self.log.append(f"start on {self.current.name}")
        self.works[id_of(received)] = stream._now(), [sent, received]
        return received

    def all_reduce(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return self.all_reduce_(x.clone(), op, group)

    def all_reduce_(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return self.collective(group, x, x)

    def start_gather(self, piece: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        return self.collective(group, piece, torch.cat([piece] * ranks))

    def all_to_all_single(self, x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
        return self.collective(group, x, x.new_zeros((sum(received), *x.shape[1:])))

    def wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id_of(tensor) in self.works:
            event, _ = self.works.pop(id_of(tensor))
            self.current._after(event)
            self.log.append(f"wait on {self.current.name}")
        return tensor


class _Kernels(TorchDispatchMode):
    """Notes each op that reads or writes memory as a kernel of the current stream."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        reads = {self.cuda.know(tensor) for tensor in given}
        written = [
            value for argument, value in zip(op._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]  # fmt: skip
        results = op(*args, **kwargs)
        writes = {id_of(tensor) for tensor in tensors_in(written)}
        writes |= {number for number in map(self.cuda.know, tensors_in(results)) if number not in reads}
        if writes:
            self.cuda.current.run(str(op).split(".")[1], reads, writes, line_here())
        return results


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def line_here() -> str:
    """The name that the present line of generated code computes."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<autopar"):
        frame = frame.f_back
    return "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().split(" ")[0]


@contextlib.contextmanager
def fake_cuda(sides: Callable[[Any], SideStreams] = SideStreams, **seconds: float) -> Iterator[Cuda]:
    """Run generated code as on CUDA. ``seconds``: of kernels, by name; ``collective`` is that of NCCL."""
    cuda = Cuda(seconds)
    with (
        mock.patch.object(side_streams, "SIDES", sides(cuda)),
        mock.patch.object(side_streams, "FUNCTIONAL", cuda),
        mock.patch.object(collectives, "FUNCTIONAL", cuda),
        mock.patch.object(bucket_collectives, "FUNCTIONAL", cuda),
        mock.patch.object(collectives, "start_gather", cuda.start_gather),
        mock.patch.object(bucket_collectives, "start_gather", cuda.start_gather),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: cuda.record_stream(tensor, stream)),
        _Kernels(cuda),
    ):
        yield cuda
