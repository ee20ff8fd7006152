"""Prove a rule by running its op on pieces.

A rule claims that an op can be split along its factors, that a pending sum passes through it, and that some factors
must stay whole. Each claim is tested on the tensors of one call:

==============  ===================================================================================================
``m``           split along ``m`` over 2 and over 3 ranks, in even or uneven, contiguous or strided pieces, and then
                joined (or reduced where results are pending), the op gives the results of one device
``0+1``         with these operands replaced by random addends, one per rank, the results sum up to those of one device
``k!``          split along ``k`` nevertheless, the op gives other results, or raises
==============  ===================================================================================================

Layouts come from ``Bound.place`` and pieces from ``runtime.simulation.pieces``, as they do in a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.errors import ProofError, SimulationError
from autopar.ir import transfers
from autopar.ir.layout import Dim, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.rules.binding import bind
from autopar.rules.registry import Rule, find_rule
from autopar.rules.strategies import Bound, Strategy
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.simulation.simulate import COLLECTIVE
from autopar.torch_private import OpOverload, pytree

AXIS = "p"
MESHES = (Mesh({AXIS: 2}), Mesh({AXIS: 3}))
SPLIT: Dim = ((None, (AXIS,)),)
TOLERANCE = 1e-11  # relative to the largest value; integers and booleans must be equal


@dataclass(frozen=True)
class Proof:
    """The claims of an op's rule that one call has proven.

    Attributes:
        op, rule: their texts.
        claims: the proven claims in words, in order.
        needed: factors with a ``!`` along which splitting this call gives wrong results.
        idle: factors with a ``!`` along which this call could be split; another call must need them.
    """

    op: str
    rule: str
    claims: tuple[str, ...]
    needed: frozenset[str]
    idle: frozenset[str]


def prove(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, rule: Rule | None = None
) -> Proof:
    """Prove every claim that ``op``'s rule makes about one call.

    A ``!`` is tested if an operand has the factor, with a size above one: a factor of results alone is no loop over an
    operand, and a single element cannot be split. Pieces may be empty, unless the rule states that the op does not
    accept empty operands.

    Args:
        op: the overload.
        args, kwargs: the arguments of one call, with real tensors for which rounding does not matter: float64, or whole
            numbers.
        rule: a rule to prove instead of the registered one.

    Raises:
        ProofError: a claim fails; quotes the op, the rule, the claim and the largest difference.
        RuleError: there is no rule, or it does not fit the call.
    """
    call = _Call(op, tuple(args), dict(kwargs or {}), rule or find_rule(op))
    claims: list[str] = []
    for factor in call.factors:
        if factor not in call.bound.whole:
            claims += [call.show_split(factor, dim, mesh) for mesh in MESHES for dim in call.splits(factor, mesh)]
    for choice in range(len(call.bound.linear)):
        if call.adds(choice):
            claims += [call.show_linear(choice, mesh) for mesh in MESHES]
    whole = [factor for factor in call.factors if factor in call.bound.whole and call.tests_whole(factor)]
    needed = frozenset(factor for factor in whole if call.needs_whole(factor))
    claims += [f"{factor} stays whole" for factor in whole if factor in needed]
    return Proof(call.bound.rule.op, call.bound.pattern.text, tuple(claims), needed, frozenset(whole) - needed)


class _Call:
    """One call of an op, with its bound rule and its results on one device."""

    def __init__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], rule: Rule) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.results = self._run(args, kwargs)
        types, options = pytree.tree_map_only(torch.Tensor, _type, (args, kwargs))
        self.bound: Bound = bind(op, types, options, [None if r is None else _type(r) for r in self.results], rule=rule)
        dims = [*self.bound.operands, *(dims for dims in self.bound.results if dims is not None)]
        self.factors = list(dict.fromkeys(factor for value in dims for dim in value for factor in dim))
        self.random = torch.Generator().manual_seed(0)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
        results = self.op(*args, **kwargs)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    # -- choosing the claims --------------------------------------------------------------------------------------

    def splits(self, factor: str, mesh: Mesh) -> list[Dim]:
        """Return the splits of a factor to test: contiguous pieces, and strided pieces if its size has a divisor."""
        size = self.bound.sizes[factor]
        major = next((n for n in range(2, size) if size % n == 0), None)
        splits = [SPLIT] if major is None else [SPLIT, ((major, ()), (size // major, (AXIS,)))]
        return [dim for dim in splits if self.bound.takes(factor, dim, mesh)]

    def adds(self, choice: int) -> bool:
        """Return whether the linear operands can be sums; booleans cannot."""
        return all(self.operands[position].dtype != torch.bool for position in self.bound.linear[choice])

    def tests_whole(self, factor: str) -> bool:
        """Return whether an operand has the factor, with more than one element."""
        return self.bound.sizes[factor] > 1 and any(_has(dims, factor) for dims in self.bound.operands)

    # -- the claims ----------------------------------------------------------------------------------------------

    def show_split(self, factor: str, dim: Dim, mesh: Mesh) -> str:
        claim = f"{factor} splits over {mesh.size} ranks" + ", in strided pieces" * (len(dim) > 1)
        self._show(claim, Strategy(split=((factor, dim),)), mesh)
        return claim

    def show_linear(self, choice: int, mesh: Mesh) -> str:
        claim = f"a sum over {mesh.size} ranks passes through {'+'.join(map(str, self.bound.linear[choice]))}"
        self._show(claim, Strategy(pending=((AXIS, choice),)), mesh)
        return claim

    def needs_whole(self, factor: str) -> bool:
        """Return whether the op gives wrong results, or raises, when it is split along the factor nevertheless."""
        for mesh in MESHES:
            if not self.bound.takes(factor, SPLIT, mesh):
                continue
            try:
                self.show_split(factor, SPLIT, mesh)
            except ProofError:
                return True
        return False

    # -- running on pieces ---------------------------------------------------------------------------------------

    def _show(self, claim: str, strategy: Strategy, mesh: Mesh) -> None:
        needs, gives = self.bound.place(strategy, mesh)
        try:
            ranks = self._run_ranks(needs, gives, dict(strategy.split), mesh)
        except Exception as error:  # if the op raises on pieces, the claim is wrong
            raise self._wrong(claim, f"on pieces it raises {type(error).__name__}: {error}") from error
        for position, (want, attr) in enumerate(zip(self.results, gives, strict=True)):
            if want is None or attr is None:
                continue
            pieces = {rank: results[position] for rank, results in ranks.items()}
            try:
                have = _joined(pieces, replace(_type(want), layout=Layout(mesh, attr)))
            except SimulationError as error:
                raise self._wrong(claim, f"result {position}: {error}") from error
            if (far := difference(have, want)) > (TOLERANCE if want.is_floating_point() or want.is_complex() else 0):
                raise self._wrong(claim, f"result {position} differs by {far:.3g} of its largest value")

    def _run_ranks(
        self, needs: Sequence[DistAttr], gives: Sequence[DistAttr | None], split: Mapping[str, Dim], mesh: Mesh
    ) -> dict[int, tuple[Any, ...]]:
        cuts = [self._pieces(tensor, attr, mesh) for tensor, attr in zip(self.operands, needs, strict=True)]
        by_rank = {}
        for rank in mesh.ranks:
            rank_pieces = iter([pieces[rank] for pieces in cuts])
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(rank_pieces), (self.args, self.kwargs))  # noqa: B023
            at = mesh.coordinates(rank)
            shapes = (attr.local_shape(result.shape, mesh, at) for result, attr in zip(self.results, gives, strict=True)
                      if result is not None and attr is not None)  # fmt: skip
            args = self.bound.rule.resized(args, next(shapes), self.bound.local_sizes(split, mesh, at))
            by_rank[rank] = self._run(args, kwargs)
        return by_rank

    def _pieces(self, tensor: torch.Tensor, attr: DistAttr, mesh: Mesh) -> dict[int, torch.Tensor]:
        """Return each rank's piece of an operand; of a pending operand, each rank's piece of a different addend."""
        type = replace(_type(tensor), layout=Layout(mesh, attr))
        addends = self._addends(tensor, mesh.size) if attr.pending else [tensor] * mesh.size
        return {
            rank: cut(addend, type, mesh.coordinates(rank)) for rank, addend in zip(mesh.ranks, addends, strict=True)
        }

    def _addends(self, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return tensors that sum up to ``tensor`` and are exact in every dtype.

        All but the last are small whole numbers, or quarters for floats.
        """
        free = [torch.randint(-16, 17, tensor.shape, generator=self.random) for _ in range(count - 1)]
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        free = [(f // 4 if whole else f / 4).to(tensor.dtype) for f in free]
        return [*free, tensor - sum(free)]

    def _wrong(self, claim: str, observed: str) -> ProofError:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in self.operands)
        return ProofError(
            f"the rule of {self.bound.rule.op}, {self.bound.pattern.text!r}, does not hold on "
            f"{shapes or 'no operands'}\n"
            f"  claim: {claim}\n"
            f"  {observed}"
        )


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _has(dims: Sequence[Sequence[str]] | None, factor: str) -> bool:
    return dims is not None and any(factor in dim for dim in dims)


def _joined(pieces: Mapping[int, torch.Tensor], type: TensorType) -> torch.Tensor:
    """Return the global value of the ranks' results; each piece must have the shape and dtype that the rule claims."""
    assert type.layout is not None
    mesh = type.layout.mesh
    for rank, piece in pieces.items():
        shape = type.attr.local_shape(type.shape, mesh, mesh.coordinates(rank))
        if (tuple(piece.shape), piece.dtype) != (shape, type.dtype):
            raise SimulationError(f"rank {rank} has {piece.dtype} {list(piece.shape)}, not {type.dtype} {list(shape)}")
    values = list(pieces.values())
    for _, kind in type.attr.pending:
        values = COLLECTIVE[transfers.all_reduce](values, [{"op": kind}] * len(values), [])
    reduced = replace(type, layout=Layout(mesh, type.attr.without_pending()))
    return join(dict(zip(pieces, values, strict=True)), reduced, "it")


def difference(have: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value (at least 1).

    Equal infinities and NaNs do not differ.
    """
    wide = torch.complex128 if want.is_complex() else torch.float64
    have, want = have.to(wide), want.to(wide)
    apart = ~((have == want) | (have.isnan() & want.isnan()))
    if not bool(apart.any()):
        return 0.0
    largest = want[want.isfinite()].abs().max().clamp_min(1.0) if bool(want.isfinite().any()) else torch.ones(())
    far = (have - want)[apart].abs().max() / largest
    return float(far) if bool(far.isfinite()) else float("inf")
