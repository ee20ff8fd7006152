"""Agreement: all ranks make the same calls, in the same order, on tensors of the same shapes; and what is one value on
the mesh is one value.

Ranks that do not would meet in collectives that do not belong together, and some of these give wrong sums without an
error. So with each forward and each backward a digest of all that was called so far goes round, with checksums of what
the ranks bring along, while the step computes; they are compared before the step's first collective.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from autopar.ir.mesh import Mesh
from autopar.runtime import current_op

KINDS = 3  # sets of axes over which brought values lie, that are told apart
SMALL = 2**20  # bytes of a call that are always looked at; more, or on a GPU, only in the first ``FIRST`` calls
FIRST = 3


@dataclass(frozen=True)
class Brought:
    """A tensor that a rank brings to a call: its piece, and the axes that split it. Ranks that differ only along others
    bring the same."""

    name: str
    piece: torch.Tensor
    axes: tuple[str, ...]


class Agreement:
    """What this rank has done so far, compared with the others.

    Args:
        control: a gloo group of all ranks.
        mesh: of these ranks.
    """

    def __init__(self, control: distributed.ProcessGroup, mesh: Mesh) -> None:
        self._control, self._mesh = control, mesh
        self._pending: tuple[distributed.Work, list[torch.Tensor], str, dict[tuple[str, ...], list[str]]] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing has been called; of calls that were refused on all ranks, the next ones know nothing."""
        self._history = hashlib.blake2b(digest_size=6)  # exact as a float
        self._seen: dict[str, int] = {}

    def begin(self, call: str, brought: Sequence[Brought] = (), kind: str = "", fact: float = 0.0) -> None:
        """This rank makes a call. ``finish`` compares.

        Args:
            call: what it is, in words that are the same on every rank.
            brought: the tensors that come with it.
            kind: calls of one kind are counted together.
            fact: a number in which the ranks may differ; it stands in the place of what is brought.
        """
        self._history.update(call.encode())
        count = self._seen[kind or call] = self._seen.get(kind or call, 0) + 1
        look = count <= FIRST or (
            sum(b.piece.nbytes for b in brought) <= SMALL and all(b.piece.device.type == "cpu" for b in brought)
        )
        own = torch.zeros(1 + 2 * KINDS, dtype=torch.float64)
        own[0], own[1] = int.from_bytes(self._history.digest(), "little"), fact
        groups: dict[tuple[str, ...], list[Brought]] = {}
        for one in brought if look else ():
            groups.setdefault(one.axes, []).append(one)
        kinds = sorted(groups)[:KINDS]
        for k, axes in enumerate(kinds):
            own[1 + 2 * k], own[2 + 2 * k] = _checksum([one.piece for one in groups[axes]])
        every = list(torch.zeros(self._control.size(), len(own), dtype=torch.float64))
        work = distributed.all_gather(every, own, self._control, async_op=True)
        assert work is not None
        self._pending = (work, every, call, {axes: [one.name for one in groups[axes]] for axes in kinds})

    def close(self) -> None:
        """Let the control group go: its threads end when nothing refers to it. No call follows."""
        del self._control

    def differ(self, call: str, fact: str) -> bool:
        """Whether the ranks, which all make this call, differ in a fact.

        Raises:
            RuntimeError: a rank makes another call.
        """
        self.finish()
        self.begin(call, fact=zlib.crc32(fact.encode()))
        assert self._pending is not None
        rows = self._pending[1]
        self.finish()
        return any(row[1] != rows[0][1] for row in rows)

    @property
    def rank(self) -> int:
        """This one."""
        return self._control.rank()

    def gathered(self, value: Any) -> list[Any]:
        """What each rank has, in the order of the ranks; pickled, tensors too. All ranks call it."""
        every: list[Any] = [None] * self._control.size()
        distributed.all_gather_object(every, value, self._control)
        return every

    def compare(self, program: str, values: Mapping[str, str]) -> None:
        """Where the ranks' programs differ, so may the Python values that forward reads; all ranks call it.

        Args:
            program: its digest.
            values: what each is called → what it is, in words.

        Raises:
            RuntimeError: both differ; ranks and values are named.
        """
        ranks: list[tuple[str, Mapping[str, str]]] = self.gathered((program, dict(values)))
        if len({digest for digest, _ in ranks}) == 1:
            return
        every = [one for _, one in ranks]
        differing = [
            name
            for name in dict.fromkeys(name for one in every for name in one)
            if len({one.get(name) for one in every}) > 1
        ]
        if differing:
            self._begin_anew()
            shown = [
                f"\n    {name}: "
                + ", ".join(f"{one.get(name, 'not read')} on rank {rank}" for rank, one in enumerate(every))
                for name in differing[:10]
            ]
            raise RuntimeError(
                f"forward reads values that differ between the ranks{''.join(shown)}\n  set them alike on all ranks"
            )

    def finish(self) -> None:
        """Wait for the others' calls, unless that was done. What is refused is refused on all ranks, and they may go on
        with calls that are alike.

        Raises:
            RuntimeError: a rank makes another call, or brings other values of what is one; ranks and calls are told.
        """
        if self._pending is None:
            return
        (work, every, call, names), self._pending = self._pending, None
        work.wait()
        rows = [row.tolist() for row in every]
        if len({row[0] for row in rows}) > 1:
            self._refuse_calls(call)
        for k, (axes, what) in enumerate(names.items()):
            first: dict[tuple[int, ...], int] = {}
            for rank, row in enumerate(rows):
                at = self._mesh.coordinates(rank)
                other = first.setdefault(tuple(at[axis] for axis in axes), rank)
                (a, scale), (b, more) = rows[other][1 + 2 * k : 3 + 2 * k], row[1 + 2 * k : 3 + 2 * k]
                if not (a == b or abs(a - b) <= max(scale, more) or (a != a and b != b)):
                    raise RuntimeError(other_values(what, axes, other, rank, self._mesh))

    def _refuse_calls(self, call: str) -> None:
        calls: list[str] = self.gathered(call)
        self._begin_anew()
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(calls):
            ranks.setdefault(one, []).append(rank)
        told = "".join(f"\n    {_ranks(some)}: {one}" for one, some in ranks.items())
        if len(ranks) == 1:
            raise RuntimeError(
                f"the ranks have not made the same calls before this one{told}\n  let all ranks call forward and "
                f"backward alike, also in the last step"
            )
        raise RuntimeError(
            f"the ranks make different calls{told}\n  let all ranks call forward and backward alike, in the same "
            f"mode, with the same options, learning rates and optimizer states, with tensors of the same shapes: "
            f'with inputs="global" the same batch, with inputs="local" pieces that differ in the number of rows alone'
        )


current_op.register(
    Agreement.finish.__code__,
    {Agreement.finish.__code__.co_firstlineno: "the comparison of the ranks' calls"},
    is_call=True,
)


def _checksum(pieces: Sequence[torch.Tensor]) -> tuple[float, float]:
    """A number that depends on every element and its place, and by how much it may differ: rounding, of floats."""
    total, scale, exact = 0.0, 0.0, 0
    for piece in pieces:
        flat = piece.detach().reshape(-1).cpu()
        if flat.is_floating_point() or flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            values = flat.double()
            total += float(values @ torch.linspace(0.5, 1.5, len(values), dtype=torch.float64))
            scale += 16 * torch.finfo(flat.dtype).eps * float(values.abs().sum())
        else:
            exact = zlib.crc32(flat.numpy().tobytes(), exact)
    return total + exact, scale


def other_values(names: Sequence[str], axes: tuple[str, ...], a: int, b: int, mesh: Mesh) -> str:
    """The error of two ranks that bring other values of what is one; ``axes``: those that split it."""
    what, at = ", ".join(names), mesh.coordinates(a)
    said = f"ranks {a} and {b} bring different values of {what}, which are one on the mesh"
    if not axes:
        return (
            f"{said}\n  let all ranks have the same (the same batch, sampled with one seed), or pass pieces with "
            f'inputs="local"'
        )
    piece = " ".join(f"{axis}={at[axis]}" for axis in axes)
    axis = axes[0]
    return (
        f"{said}: both hold the piece at {piece}\n  let them have the same: a DistributedSampler takes "
        f"num_replicas={mesh.sizes[axis]} and rank=mesh.coordinates(rank)[{axis!r}]"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"
