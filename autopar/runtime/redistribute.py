"""Relay: one value from one Layout to another outside of a program, on simulated ranks or on processes; differentiable.

The gradient of a piece lies as the piece does, and is whole over axes on which the value is pending: every addend has the
gradient of the sum. So a transition from A to B has one from gradient(B) to gradient(A) as its backward: P → S
(reduce-scatter) has an all-gather, P → R (all-reduce) the identity, S → R (all-gather) a slice. What is replicated has one
gradient, the same on every rank, as if one of them used it (Shoeybi et al., Megatron-LM, 2019: the operators f and g).
"""

from __future__ import annotations

from collections.abc import Mapping
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
from autopar.ir.nodes import make_node, set_record
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, Result, TensorType
from autopar.ir.text.printer import print_type
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.lower import Lowered, lower
from autopar.runtime.simulation.simulate import Instruction, compile_phases, run_ranks
from autopar.transitions import transitions
from autopar.verify.levels import verify


def gradient_type(type: TensorType) -> TensorType:
    """How the gradient of a value lies: as it does, and whole where it is pending.

    Raises:
        TransitionError: a pending max, min or product, whose gradient depends on the values.
    """
    assert type.layout is not None
    for axis, kind in type.attr.pending:
        if kind not in ("sum", "avg"):
            raise TransitionError(
                f"the gradient of {print_type(type)} has no Layout: what a rank gets of it depends on the values that are "
                f"pending {kind} over {axis}; reduce it first, outside of what is differentiated"
            )
    return replace(type, layout=Layout(type.layout.mesh, type.attr.without_pending()))


def averaged_over(type: TensorType) -> int:
    """How many values are averaged to one."""
    assert type.layout is not None
    return type.layout.mesh.count(axis for axis, kind in type.attr.pending if kind == "avg")


@dataclass(frozen=True)
class Relay:
    """The way of one value from ``source`` to ``target``.

    Raises:
        TransitionError: when it is made, where no transfers lead there.
    """

    source: TensorType
    target: TensorType

    def __post_init__(self) -> None:
        transitions(*self._ends)

    @cached_property
    def _ends(self) -> tuple[TensorType, TensorType]:
        """Both, on stages of one mesh where they lie on two."""
        here, there = self.source.layout, self.target.layout
        if here is None or there is None or here.mesh == there.mesh:
            return self.source, self.target
        stages = [Mesh(layout.mesh.sizes, ranks=layout.mesh.ranks, name=name) for layout, name in ((here, "source"), (there, "target"))]
        first, last = (
            replace(t, layout=Layout(mesh, layout.attr))
            for t, mesh, layout in zip((self.source, self.target), stages, (here, there), strict=True)
        )
        return first, last

    @cached_property
    def program(self) -> Program:
        """The explicit program ``x → x``, with the transfers."""
        source, target = self._ends
        assert source.layout is not None and target.layout is not None
        mesh, stages = source.layout.mesh, {}
        if mesh != target.layout.mesh:
            stages = {"source": mesh, "target": target.layout.mesh}
            mesh = Mesh(rank=len(every := sorted({*mesh.ranks, *target.layout.mesh.ranks})), ranks=every)
        source, target = (replace(t, layout=Layout(t.layout.mesh, t.attr.normalize(t.shape, t.layout.mesh))) for t in (source, target))  # type: ignore[union-attr]
        program = Program(fx.Graph(), "explicit", mesh, stages=stages, tree=("", ""))
        x = make_node(program.graph, "x", "placeholder", "x", (), {})
        set_record(x, Record(source, role="input"))
        output = make_node(program.graph, "output", "output", "output", ((x,),), {})
        set_record(output, Record(None, (Requirement(target.layout, target.dtype),), results=(Result("return"),)))  # type: ignore[arg-type]
        with program.edit() as edit:
            value: Value = x
            for step in transitions(source, target):
                args, kwargs = transfers.call(step.function, value, dict(step.arguments))
                value = edit.insert(step.function, args, kwargs, before=output)
            edit.replace_use(output, x, value)
        verify(program, "relay")
        return program

    @cached_property
    def local(self) -> LocalPrograms:
        """Rank → its local program."""
        return LocalPrograms(self.program, lambda made: verify(made, "localize"))

    @cached_property
    def backward(self) -> Relay:
        """The way of the gradient."""
        return Relay(gradient_type(self.target), gradient_type(self.source))

    @property
    def factor(self) -> float:
        """What the gradient is multiplied by: averages have shares of it."""
        return averaged_over(self.target) / averaged_over(self.source)

    # -- on simulated ranks ----------------------------------------------------------------------------------------

    def simulate(self, pieces: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Rank → piece of the target, of the pieces of the source; attached to autograd.

        Raises:
            ValueError: a piece is missing, or is not of the shape or dtype that the rank has.
        """
        ranks = tuple(self.source.layout.mesh.ranks)  # type: ignore[union-attr]
        if sorted(pieces) != sorted(ranks):
            raise ValueError(f"pieces are given of the ranks {sorted(pieces)}; {print_type(self.source)} lies on {sorted(ranks)}")
        for rank in ranks:
            self._check(rank, pieces[rank])
        found = _Simulated.apply(self, *(pieces[rank] for rank in ranks))  # type: ignore[no-untyped-call]
        return dict(zip(self.target.layout.mesh.ranks, found, strict=True))  # type: ignore[union-attr]

    def _check(self, rank: int, piece: torch.Tensor) -> None:
        mesh = self.source.layout.mesh  # type: ignore[union-attr]
        shape = self.source.attr.local_shape(self.source.shape, mesh, mesh.coordinates(rank))
        if (tuple(piece.shape), piece.dtype) != (shape, self.source.dtype):
            raise ValueError(
                f"rank {rank} has a piece {list(shape)}, {self.source.dtype} of {print_type(self.source)}, and was given "
                f"{list(piece.shape)}, {piece.dtype}"
            )

    def _run(self, pieces: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        code: dict[int, list[Instruction]] = {}
        for rank, program in self.local.items():
            code[rank] = compile_phases(program).get("forward", [])
        values: dict[int, dict[str, Any]] = {rank: {"x": pieces[rank].detach()} if rank in pieces else {} for rank in code}
        run_ranks(self.program.meshes, code, values)
        name = self.program.output.args[0][0].name  # type: ignore[index,union-attr]
        return {rank: values[rank][name] for rank in self.target.layout.mesh.ranks}  # type: ignore[union-attr]

    # -- on processes ----------------------------------------------------------------------------------------------

    def on(self, rank: int, groups: Mapping[tuple[int, ...], str], device: torch.device | None = None) -> RelayOnRank:
        """Ready to run in the process of ``rank``.

        Args:
            groups: ranks, in ascending order → the name of their process group.
        """
        return RelayOnRank(self, rank, groups, device or torch.device("cpu"))


@dataclass(frozen=True)
class RelayOnRank:
    """A relay in one process: the piece in, the piece out. Every rank of both meshes calls it.

    Between two meshes it is not attached to autograd, for a rank may have only one of the ends; ``backward`` is the way
    of the gradient.
    """

    relay: Relay
    rank: int
    groups: Mapping[tuple[int, ...], str]
    device: torch.device

    @cached_property
    def _lowered(self) -> Lowered:
        return lower(self.relay.local[self.rank], self.groups, device=self.device)["forward"]

    @cached_property
    def backward(self) -> RelayOnRank:
        """The way of the gradient, which is to be multiplied by ``relay.factor``."""
        return self.relay.backward.on(self.rank, self.groups, self.device)

    def __call__(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        """The rank's piece of the target; ``None`` in and out where it lies on the other mesh alone.

        Raises:
            ValueError: the piece is not of the shape or dtype that the rank has, or there should be none.
        """
        if (piece is None) == (self.rank in self.relay.source.layout.mesh.ranks):  # type: ignore[union-attr]
            where = f"{print_type(self.relay.source)} lies on {sorted(self.relay.source.layout.mesh.ranks)}"  # type: ignore[union-attr]
            raise ValueError(f"rank {self.rank} was given {'no piece' if piece is None else 'a piece'}; {where}")
        if piece is not None:
            self.relay._check(self.rank, piece)
        if self.relay.source.layout.mesh == self.relay.target.layout.mesh:  # type: ignore[union-attr]
            return _OnRank.apply(self, piece)  # type: ignore[no-untyped-call]
        return self._run(piece)

    def _run(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        found = self._lowered.run([] if piece is None else [piece.detach()])
        return found[0] if found else None


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, relay: Relay, *pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.relay = relay
        made = relay._run(dict(zip(relay.source.layout.mesh.ranks, pieces, strict=True)))  # type: ignore[union-attr]
        return tuple(made[rank].clone() for rank in relay.target.layout.mesh.ranks)  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        relay: Relay = ctx.relay
        pieces = dict(zip(relay.target.layout.mesh.ranks, gradients, strict=True))  # type: ignore[union-attr]
        made = relay.backward.simulate(pieces)
        return (None, *(made[rank] * relay.factor for rank in relay.source.layout.mesh.ranks))  # type: ignore[union-attr]


class _OnRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, relay: RelayOnRank, piece: torch.Tensor) -> torch.Tensor:
        ctx.relay = relay
        made = relay._run(piece)
        assert made is not None
        return made.clone() if made.data_ptr() == piece.data_ptr() else made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        relay: RelayOnRank = ctx.relay
        return None, relay.backward(gradient) * relay.relay.factor  # type: ignore[operator]
