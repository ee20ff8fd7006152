"""Redistribute one value from one Layout to another outside of a program, with gradients.

It runs on simulated ranks or on processes. The gradient of a piece has the layout of the piece, but is replicated over
axes on which the value is a partial sum: every addend has the gradient of the sum. So the backward of a transition from
A to B is a transition from gradient(B) to gradient(A): that of P → S (reduce-scatter) is an all-gather, that of P → R
(all-reduce) the identity, that of S → R (all-gather) a slice. A replicated value has one gradient, the same on every
rank, as if one rank used it (Shoeybi et al., Megatron-LM, 2019: the operators f and g).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.errors import TransitionError
from autopar.ir import transfers
from autopar.ir.edit import Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import make_node, operands, set_record
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, Result, TensorType
from autopar.ir.streams import Groups
from autopar.ir.text.printer import print_type
from autopar.runtime import current_op
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.lower import Lowered, lower
from autopar.runtime.simulation.in_flight import Instruction
from autopar.runtime.simulation.simulate import compile_phases, run_ranks
from autopar.scheduling.programs.order import OF_CALLS, Order, lines_of
from autopar.transitions import transitions
from autopar.verify.levels import verify

OfPieces = Callable[..., Sequence[torch.Tensor]]


def gradient_type(type: TensorType) -> TensorType:
    """Return the type of a value's gradient: it has the value's splits.

    It is replicated where the value is pending.

    Raises:
        TransitionError: the value is a pending max, min or product, whose gradient depends on the values.
    """
    assert type.layout is not None
    for axis, kind in type.attr.pending:
        if kind not in ("sum", "avg"):
            raise TransitionError(
                f"the gradient of {print_type(type)} has no Layout: each rank's share depends on the values, which are "
                f"pending {kind} over {axis}; reduce the value first, outside of the differentiated computation"
            )
    return reduced(type)


def reduced(type: TensorType) -> TensorType:
    """Return the type of the value when it is reduced: it keeps its splits."""
    assert type.layout is not None
    return replace(type, layout=Layout(type.layout.mesh, type.attr.without_pending()))


def averaged_over(type: TensorType) -> int:
    """Return how many values are averaged to one."""
    assert type.layout is not None
    return type.layout.mesh.count(axis for axis, kind in type.attr.pending if kind == "avg")


@dataclass(frozen=True)
class Redistribution:
    """The transfers of one value from ``source`` to ``target``.

    Raises:
        TransitionError: no transfers lead from source to target; raised by the constructor.
    """

    source: TensorType
    target: TensorType

    def __post_init__(self) -> None:
        transitions(*self._ends)

    @cached_property
    def _ends(self) -> tuple[TensorType, TensorType]:
        """Source and target; if they are on two meshes, on two stages of one mesh."""
        before, after = self.source.layout, self.target.layout
        if before is None or after is None or before.mesh == after.mesh:
            return self.source, self.target
        stages = [
            Mesh(layout.mesh.sizes, ranks=layout.mesh.ranks, name=name)
            for layout, name in ((before, "source"), (after, "target"))
        ]
        first, last = (
            replace(t, layout=Layout(mesh, layout.attr))
            for t, mesh, layout in zip((self.source, self.target), stages, (before, after), strict=True)
        )
        return first, last

    @cached_property
    def program(self) -> Program:
        """The explicit program ``x → x`` with the transfers."""
        source, target = self._ends
        assert source.layout is not None and target.layout is not None
        mesh, stages = source.layout.mesh, {}
        if mesh != target.layout.mesh:
            stages = {"source": mesh, "target": target.layout.mesh}
            mesh = Mesh(rank=len(every := sorted({*mesh.ranks, *target.layout.mesh.ranks})), ranks=every)
        source, target = (
            replace(t, layout=Layout(t.mesh, t.attr.normalize(t.shape, t.mesh))) for t in (source, target)
        )
        program = Program(fx.Graph(), "explicit", mesh, stages=stages, tree=("", ""))
        x = make_node(program.graph, "x", "placeholder", "x", (), {})
        set_record(x, Record(source, role="input"))
        output = make_node(program.graph, "output", "output", "output", ((x,),), {})
        set_record(output, Record(None, (Requirement(target.layout, target.dtype),), results=(Result("return"),)))
        with program.edit() as edit:
            value: Value = x
            for step in transitions(source, target):
                args, kwargs = transfers.call(step.function, value, dict(step.arguments))
                value = edit.insert(step.function, args, kwargs, before=output)
            edit.replace_use(output, x, value)
        verify(program, "redistribute")
        return program

    @cached_property
    def local(self) -> LocalPrograms:
        """Rank → its scheduled program."""
        order = Order(lines_of(self.program, OF_CALLS), ())
        return LocalPrograms(self.program, lambda program: verify(program, "schedule"), order)

    @cached_property
    def backward(self) -> Redistribution:
        """The redistribution of the gradient."""
        return Redistribution(gradient_type(self.target), gradient_type(self.source))

    @property
    def factor(self) -> float:
        """The factor of the gradient: each addend of an average has a share of it."""
        return averaged_over(self.target) / averaged_over(self.source)

    # -- on simulated ranks ----------------------------------------------------------------------------------------

    def simulate(self, pieces: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the pieces of the target, by rank, from the pieces of the source, by rank; attached to autograd.

        Raises:
            ValueError: a piece is missing, or has another shape or dtype than the rank's piece.
        """
        ranks = tuple(self.source.mesh.ranks)
        if sorted(pieces) != sorted(ranks):
            raise ValueError(
                f"pieces are given for the ranks {sorted(pieces)}, but {print_type(self.source)} is on the ranks "
                f"{sorted(ranks)}"
            )
        for rank in ranks:
            self.check(rank, pieces[rank])
        targets = self.target.mesh.ranks

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            results = self._run(dict(zip(ranks, given, strict=True)))
            return [results[rank].clone() for rank in targets]

        def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
            results = self.backward.simulate(dict(zip(targets, gradients, strict=True)))
            return [results[rank] * self.factor for rank in ranks]

        results = _Differentiable.apply(run, back, *(pieces[rank] for rank in ranks))
        return dict(zip(targets, results, strict=True))

    def check(self, rank: int, piece: torch.Tensor) -> None:
        """``ValueError`` if a piece has another shape or dtype than the rank's piece of the source."""
        mesh = self.source.mesh
        shape = self.source.attr.local_shape(self.source.shape, mesh, mesh.coordinates(rank))
        if (tuple(piece.shape), piece.dtype) != (shape, self.source.dtype):
            raise ValueError(
                f"the piece of rank {rank} is {list(shape)}, {self.source.dtype} of {print_type(self.source)}, but got "
                f"{list(piece.shape)}, {piece.dtype}"
            )

    def _run(self, pieces: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        code: dict[int, list[Instruction]] = {}
        for rank, program in self.local.items():
            code[rank] = compile_phases(program).get("forward", [])
        values: dict[int, dict[str, Any]] = {
            rank: {"x": pieces[rank].detach()} if rank in pieces else {} for rank in code
        }
        run_ranks(self.program.meshes, code, values)
        name = operands(self.program.output)[0].name
        return {rank: values[rank][name] for rank in self.target.mesh.ranks}

    # -- on processes ----------------------------------------------------------------------------------------------

    def on(self, rank: int, groups: Groups, device: torch.device | None = None) -> RedistributionOnRank:
        """Return this redistribution, ready to run in the process of ``rank``.

        Args:
            groups: the names of the process groups.
        """
        return RedistributionOnRank(self, rank, groups, device or torch.device("cpu"))


@dataclass(frozen=True)
class RedistributionOnRank:
    """A redistribution in one process, from this rank's old piece to its new piece. Every rank of both meshes calls it.

    Between two meshes it is not attached to autograd, because a rank may be on only one of them; use ``backward`` for
    the gradient.
    """

    redistribution: Redistribution
    rank: int
    groups: Groups
    device: torch.device

    @cached_property
    def _lowered(self) -> Lowered:
        return lower(self.redistribution.local[self.rank], self.groups, device=self.device)["forward"]

    @cached_property
    def backward(self) -> RedistributionOnRank:
        """The redistribution of the gradient; multiply its result by ``redistribution.factor``."""
        return self.redistribution.backward.on(self.rank, self.groups, self.device)

    def __call__(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        """Return the rank's piece of the target.

        The old or the new piece is ``None`` if the rank is only on the other mesh.

        Raises:
            ValueError: the piece has another shape or dtype than the rank's piece, or is missing, or the rank has none.
        """
        if (piece is None) == (self.rank in self.redistribution.source.mesh.ranks):
            where = (
                f"{print_type(self.redistribution.source)} is on the ranks "
                f"{sorted(self.redistribution.source.mesh.ranks)}"
            )
            raise ValueError(f"rank {self.rank} got {'no piece' if piece is None else 'a piece'}, but {where}")
        if piece is not None:
            self.redistribution.check(self.rank, piece)
        if self.redistribution.source.mesh == self.redistribution.target.mesh:
            return _Differentiable.apply(self._run_apart, self._back, piece)[0]
        return self._run(piece)

    def _run_apart(self, piece: torch.Tensor) -> list[torch.Tensor]:
        result = self._run(piece)
        assert result is not None
        return [result.clone() if result.data_ptr() == piece.data_ptr() else result]

    def _back(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        result = self.backward(gradient)
        assert result is not None
        return [result * self.redistribution.factor]

    def _run(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        current_op.tick()
        results = self._lowered.run([] if piece is None else [piece.detach()])
        return results[0] if results else None


class _Differentiable(torch.autograd.Function):
    """A function of pieces, with the function from the gradients of its results to theirs."""

    @staticmethod
    def forward(ctx: Any, run: OfPieces, back: OfPieces, *pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        return tuple(run(*pieces))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.back(*gradients))
