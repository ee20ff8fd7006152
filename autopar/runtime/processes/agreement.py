"""Check that all ranks make the same calls, in the same order, with tensors of the same shapes and values.

Ranks that make different calls would meet in collectives that do not belong together, and some of these give wrong sums
without an error. So each forward and each backward sends a digest of all calls so far to the other ranks, with
checksums of the tensors that the ranks bring (of small ones on CPUs; of others in the first three calls). The exchange
runs while the step computes; the result is compared before the step's first collective.
"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.runtime import current_op
from autopar.runtime.current_slot import waiting_for
from autopar.runtime.marks import wait_begins, wait_ends
from autopar.runtime.processes.replicas import Replicas

T = TypeVar("T")
KINDS = 3  # tensors sharded over so many different sets of axes have a checksum for each set
SMALL = 2**20  # up to so many bytes every call on CPU is compared; other calls only the first ``FIRST`` times
FIRST = 3
COMPARISON = "the comparison of the ranks' calls"

Pace = tuple[float, float]  # seconds that a rank computed in its latest step, and that it spent between the latest two
UNKNOWN: Pace = (-1.0, -1.0)


@dataclass(frozen=True)
class Brought:
    """A tensor that a rank brings to a call: its piece, and the axes that shard it.

    Ranks that differ only along other axes must bring the same piece.
    """

    name: str
    piece: torch.Tensor
    axes: tuple[str, ...]


@dataclass(frozen=True)
class _Sent:
    """A call that this rank has sent.

    Attributes:
        work: the exchange.
        rows: what each rank sends.
        call: a description of this rank's call.
        remedy: what to do if another rank makes another call.
        names: axes → the tensors whose checksum is that of the axes.
    """

    work: distributed.Work
    rows: torch.Tensor
    call: str
    remedy: str
    names: dict[tuple[str, ...], list[str]]


class Agreement:
    """Compares the calls of this rank with the calls of the other ranks.

    Args:
        control: a gloo group of all ranks.
        mesh: the mesh of these ranks.

    Attributes:
        pace: this rank's, which goes to the others with each call.
        paces: those of all ranks, as they were at the latest comparison.
        replicas: the parameters whose writes between calls are compared; ``None`` for none.
    """

    def __init__(self, control: distributed.ProcessGroup, mesh: Mesh) -> None:
        self._control, self._mesh = control, mesh
        self._others = tuple(rank for rank in mesh.ranks if rank != distributed.get_rank())
        self._pending: _Sent | None = None
        _every.add(self)
        self.pace, self.paces = UNKNOWN, list[Pace]()
        self.replicas: Replicas | None = None
        self._history = hashlib.blake2b(digest_size=6)  # exact as a float
        self._counts: dict[str, int] = {}

    def _begin_anew(self) -> None:
        """Forget all calls. A call that was refused on all ranks does not count in the digests that follow.

        Nor in those of other models, of which another rank may have made the call.
        """
        for other in [self, *_every]:
            if other is self or getattr(other, "_control", None) is self._control:
                other._history, other._counts = hashlib.blake2b(digest_size=6), {}

    def begin(
        self, call: str, brought: Sequence[Brought] = (), kind: str = "", fact: float = 0.0, remedy: str = ""
    ) -> None:
        """Send the other ranks a digest of a call that this rank makes. ``finish`` compares it with theirs.

        Args:
            call: a description of the call, the same on every rank that makes it.
            brought: the tensors of the call, which ranks must agree on.
            kind: calls of one kind are counted together.
            fact: a number that may differ between ranks; it is sent in place of the first checksum.
            remedy: what to do if another rank makes another call; there is a general one.
        """
        self._history.update(call.encode())
        count = self._counts[kind or call] = self._counts.get(kind or call, 0) + 1
        is_compared = count <= FIRST or (
            sum(b.piece.nbytes for b in brought) <= SMALL and all(b.piece.device.type == "cpu" for b in brought)
        )
        row = torch.zeros(1 + 2 * KINDS + 3, dtype=torch.float64)
        row[0], row[1] = int.from_bytes(self._history.digest(), "little"), fact
        row[-3] = 0.0 if self.replicas is None else self.replicas.mark()
        row[-2], row[-1] = self.pace
        by_axes: dict[tuple[str, ...], list[Brought]] = {}
        for tensor in brought if is_compared else ():
            by_axes.setdefault(tensor.axes, []).append(tensor)
        kinds = sorted(by_axes)[:KINDS]
        for k, axes in enumerate(kinds):
            row[1 + 2 * k], row[2 + 2 * k] = _checksum([tensor.piece for tensor in by_axes[axes]])
        rows = torch.empty(self._control.size(), len(row), dtype=torch.float64)
        # an all-gather of gloo goes round the ranks, and takes more turns of its threads than a message to each
        work = distributed.all_to_all_single(rows, row.repeat(len(rows), 1), group=self._control, async_op=True)
        assert work is not None
        names = {axes: list(dict.fromkeys(tensor.name for tensor in by_axes[axes])) for axes in kinds}
        self._pending = _Sent(work, rows, call, remedy, names)

    def agree(self, call: str, remedy: str = "") -> None:
        """Wait until all ranks make this call. ``RuntimeError`` if one of them makes another call.

        ``remedy``: as of ``begin``.
        """
        self.finish()
        self.begin(call, remedy=remedy)
        self.finish()

    def close(self) -> None:
        """Drop the control group, so that its threads end. No call may follow."""
        del self._control

    def differ(self, call: str, fact: str) -> bool:
        """Return whether a fact differs between the ranks. All ranks make this call.

        Raises:
            RuntimeError: a rank makes another call.
        """
        self.finish()
        self.begin(call, fact=zlib.crc32(fact.encode()))
        assert self._pending is not None
        rows = self._pending.rows
        self.finish()
        return any(row[1] != rows[0][1] for row in rows)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._control.rank()

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. They are pickled. All ranks call it."""
        every: list[Any] = [None] * self._control.size()
        distributed.all_gather_object(every, value, self._control)
        return every

    def of_first(self, make: Callable[[], T]) -> T:
        """Return what the first rank makes, or raise its ``AutoparError``. Both are pickled. All ranks call it."""
        made, error = None, None
        if self.rank == 0:
            try:
                made = make()
            except AutoparError as raised:
                error = raised
        made, raised_by_first = self.gathered((made, error))[0]
        if raised_by_first is not None:
            raise error or raised_by_first
        return cast(T, made)

    def text_of_first(self, text: str) -> str:
        """Return the text of the first rank. All ranks call it; that of the others does not count."""
        first = [text]
        distributed.broadcast_object_list(first, group=self._control, group_src=0)
        return first[0]

    def compare(self, program: str, values: Mapping[str, str]) -> None:
        """Compare the programs of all ranks, and explain a difference by the Python values that forward read.

        All ranks call it.

        Args:
            program: the digest of this rank's program.
            values: name of a value → the value as text.

        Raises:
            RuntimeError: programs and values differ; the error names the ranks and the values.
        """
        ranks: list[tuple[str, Mapping[str, str]]] = self.gathered((program, dict(values)))
        if len({digest for digest, _ in ranks}) == 1:
            return
        values_by_rank = [read for _, read in ranks]
        differing = [
            name
            for name in dict.fromkeys(name for read in values_by_rank for name in read)
            if len({read.get(name) for read in values_by_rank}) > 1
        ]
        if differing:
            self._begin_anew()
            shown = [
                f"\n    {name}: "
                + ", ".join(f"{read.get(name, 'not read')} on rank {rank}" for rank, read in enumerate(values_by_rank))
                for name in differing[:10]
            ]
            raise RuntimeError(
                f"forward reads values that differ between the ranks{''.join(shown)}\n  set them alike on all ranks"
            )

    def finish(self) -> None:
        """Wait for the calls that the other ranks sent, and compare them; nothing to do if that was done before.

        An error is raised on all ranks. They may go on with calls that agree.

        Raises:
            RuntimeError: a rank makes another call, or brings other values of the same piece. The error names the
                ranks and their calls.
        """
        if self._pending is None:
            return
        sent, self._pending = self._pending, None
        begun = wait_begins()
        with waiting_for(self._others, COMPARISON, is_collective=True):
            sent.work.wait()
        wait_ends(begun)
        rows = sent.rows.tolist()
        self.paces = [(row[-2], row[-1]) for row in rows]
        if len({row[0] for row in rows}) > 1:
            self._refuse_calls(sent.call, sent.remedy)
        if any(row[-3] for row in rows) and self.replicas is not None:
            differing = self.replicas.compare(self.gathered, [row[-3] for row in rows])
            if differing is not None:
                raise refused_by_all(differing)
        for k, (axes, names_of_axes) in enumerate(sent.names.items()):
            first: dict[tuple[int, ...], int] = {}
            for rank, row in enumerate(rows):
                at = self._mesh.coordinates(rank)
                other = first.setdefault(tuple(at[axis] for axis in axes), rank)
                (a, a_error), (b, b_error) = rows[other][1 + 2 * k : 3 + 2 * k], row[1 + 2 * k : 3 + 2 * k]
                if not (a == b or abs(a - b) <= max(a_error, b_error) or (a != a and b != b)):
                    raise refused_by_all(other_values(names_of_axes, axes, other, rank, self._mesh))

    def _refuse_calls(self, call: str, remedy: str) -> None:
        sent: list[tuple[str, str]] = self.gathered((call, remedy))
        calls = [made for made, _ in sent]
        self._begin_anew()
        ranks_by_call: dict[str, list[int]] = {}
        for rank, made in enumerate(calls):
            ranks_by_call.setdefault(made, []).append(rank)
        lines = "".join(f"\n    {_ranks(ranks)}: {made}" for made, ranks in ranks_by_call.items())
        if len(ranks_by_call) == 1:
            raise refused_by_all(
                f"the ranks have not made the same calls before this one{lines}\n  let all ranks call forward and "
                f"backward alike, also in the last step"
            )
        if remedies := dict.fromkeys(own for _, own in sent if own):
            raise refused_by_all(f"the ranks make different calls{lines}\n  {'; '.join(remedies)}")
        raise refused_by_all(
            f"the ranks make different calls{lines}\n  let all ranks call forward and backward alike, in the same "
            f"mode, with the same options, learning rates and optimizer states, with tensors of the same shapes: "
            f'with inputs="global" the same batch, with inputs="local" pieces that differ in the number of rows alone'
        )


_REFUSED = "_autopar_refused"  # an attribute of an error


def refused_by_all(text: str) -> RuntimeError:
    """Return the error of a call that all ranks refuse, before any message of it."""
    error = RuntimeError(text)
    setattr(error, _REFUSED, True)
    return error


def is_refused_by_all(error: BaseException) -> bool:
    """Return whether all ranks have raised this error, and may go on with calls that agree."""
    return getattr(error, _REFUSED, False)


_every: weakref.WeakSet[Agreement] = weakref.WeakSet()

current_op.register(Agreement.finish.__code__, {Agreement.finish.__code__.co_firstlineno: COMPARISON}, is_call=True)


def _checksum(pieces: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return a number that depends on every element and its position, and by how much rounding may change it."""
    total, error, integers = 0.0, 0.0, 0
    for piece in pieces:
        flat = piece.detach().reshape(-1).cpu()
        if flat.is_floating_point() or flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            values = flat.double()
            total += float(values @ torch.linspace(0.5, 1.5, len(values), dtype=torch.float64))
            error += 16 * torch.finfo(flat.dtype).eps * float(values.abs().sum())
        else:
            integers = zlib.crc32(flat.numpy().tobytes(), integers)
    return total + integers, error


def other_values(names: Sequence[str], axes: tuple[str, ...], a: int, b: int, mesh: Mesh) -> str:
    """Return the error for two ranks that bring different values of one piece. ``axes``: those that shard the value."""
    at = mesh.coordinates(a)
    said = f"ranks {a} and {b} bring different values of {', '.join(names)}, which must be equal on these ranks"
    if not axes:
        return (
            f"{said}\n  pass the whole batch on each rank, as autopar.data.sharded gives it (a DistributedSampler "
            f'gives each rank other rows), or let each pass its own rows: parallelize(…, inputs="local")'
        )
    piece = " ".join(f"{axis}={at[axis]}" for axis in axes)
    axis = axes[0]
    return (
        f"{said}: both hold the piece at {piece}\n  let them have the same: a DistributedSampler takes "
        f"num_replicas={mesh.sizes[axis]} and rank=mesh.coordinates(rank)[{axis!r}]"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"
