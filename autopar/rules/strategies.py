"""Place the strategies of a rule that is bound to shapes, and check Layouts against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autopar.ir.layout import UNDECIDED, WHOLE, Dim, DistAttr, normal_dim, regroup
from autopar.ir.mesh import Mesh
from autopar.rules.notation import DimPattern, Pattern
from autopar.rules.registry import Rule, Work

Dims = tuple[DimPattern, ...]

CACHED = 65536  # the most results that each cache keeps; a result takes less than 1 KB, and is soon made again


@dataclass(frozen=True)
class Strategy:
    """One choice: the split of each factor, and the axes over which a pending sum passes through.

    A factor is split like a dim, and may have several parts: a batch flattened with an unevenly split sequence is
    one factor of a matrix product, ``(5/dp 3)``.
    """

    split: tuple[tuple[str, Dim], ...] = ()
    pending: tuple[tuple[str, int], ...] = ()  # (axis, index of the linear alternative)


@dataclass(eq=False)
class Bound:
    """A rule bound to shapes. Operands and results are only the present ones (optional ones may be absent).

    Attributes:
        sizes: factor → size.
        operands, results: the factors of each dim; ``()`` is a dim of size one.
        whole: factors that must not be split.
        kind: the reduction of results that lack a split factor.
        linear: the alternatives, as positions in ``operands``.
        carried: factor → operands that must be pending when it is split (the bias of ``addmm`` when ``k`` is).
        why: for an op without a rule, why no rule was found.
        terms: the floating point operations in factors.
        own: positions of operands, and those of results, that are no data but each rank's own; their dims are whole.
    """

    rule: Rule
    pattern: Pattern
    sizes: dict[str, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...] | None, ...]
    linear: tuple[tuple[int, ...], ...]
    carried: dict[str, frozenset[int]]
    why: str = ""
    terms: Work = ()
    own: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    @cached_property
    def whole(self) -> frozenset[str]:
        rows = [(self.operands[k]) for k in self.own[0]] + [self.results[k] or () for k in self.own[1]]
        return self.pattern.whole.union(*(dim for dims in rows for dim in dims))

    @cached_property
    def _lacking(self) -> tuple[frozenset[str], ...]:
        """For each result the factors that operands have and it lacks: if one is split, the result is pending."""
        read = {factor for operand in self.operands for dim in operand for factor in dim}
        return tuple(
            frozenset() if k in self.own[1] else frozenset(read.difference(*dims)) if dims else frozenset(read)
            for k, dims in enumerate(self.results)
        )

    @property
    def sums(self) -> bool:
        """Whether a split of some factor leaves a result as a pending sum."""
        return self.pattern.kind == "sum" and any(
            factor not in self.whole and self.sizes[factor] > 1
            for dims, lacking in zip(self.results, self._lacking, strict=True)
            if dims is not None
            for factor in lacking
        )

    def place(self, strategy: Strategy, mesh: Mesh) -> tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]:
        """Return the attributes that a strategy requires of the operands, and those of the results."""
        return _place(self, strategy, mesh)

    def takes(self, factor: str, dim: Dim, mesh: Mesh) -> bool:
        """Return whether the op accepts the pieces of a factor with this split: some rules allow no empty pieces."""
        return self.rule.empty or not _has_empty_piece(dim, self.sizes[factor], mesh)

    def factor_splits(
        self, dims: Dims, shape: tuple[int, ...], attr: DistAttr, mesh: Mesh
    ) -> list[dict[str, Dim] | None]:
        """Return for each dim of a value the splits of its factors; ``None`` for a dim without split factors."""
        splits: list[dict[str, Dim] | None] = []
        for pattern, size, dim in zip(dims, shape, attr.dims, strict=True):
            parts = [(size if part is None else part, axes) for part, axes in dim]
            groups = regroup(parts, [self.sizes[f] for f in pattern] or [1], mesh)
            if groups is None or (not pattern and axes_of(dim)):
                splits.append(None)
            else:
                pairs = zip(pattern, groups, strict=False)
                splits.append({f: normal_dim(tuple(group), self.sizes[f], mesh) for f, group in pairs})
        return splits

    def before(self, attr: DistAttr, mesh: Mesh) -> DistAttr | None:
        """Return the attribute of a view's operand whose result has ``attr``; ``None`` if there is none."""
        needs = self.operands_before(attr, mesh)
        return None if needs is None else needs[0]

    def operands_before(self, attr: DistAttr, mesh: Mesh) -> tuple[DistAttr, ...] | None:
        """Return the attributes of the operands with which the result has ``attr``; ``None`` if there are none."""
        dims, shape = self.results[0], self.result_shapes[0]
        assert dims is not None and shape is not None
        closed = DistAttr(tuple(WHOLE if UNDECIDED in axes_of(dim) else dim for dim in attr.dims)).normalize(
            shape, mesh
        )
        rows = self.factor_splits(dims, shape, closed, mesh)
        split = {f: dim for row in rows if row for f, dim in row.items() if axes_of(dim)}
        if None in rows or self.whole & split.keys():
            return None
        needs, gives = self.place(Strategy(tuple(sorted(split.items()))), mesh)
        return needs if gives[0] == closed else None

    def splits(self, needs: Sequence[DistAttr], gives: Sequence[DistAttr | None], mesh: Mesh) -> dict[str, Dim]:
        """Return the split of each factor, given the attributes of operands and results."""
        rows = [
            *zip(self.operands, self.operand_shapes, needs, strict=True),
            *zip(self.results, self.result_shapes, gives, strict=True),
        ]
        splits: dict[str, Dim] = {}
        for dims, shape, attr in rows:
            if dims is not None and shape is not None and attr is not None:
                for row in self.factor_splits(dims, shape, attr, mesh):
                    splits |= row or {}
        return splits

    def local_sizes(self, split: Mapping[str, Dim], mesh: Mesh, at: Mapping[str, int]) -> dict[str, int]:
        """Return the size of each factor on the rank at ``at``."""
        return {f: DistAttr((split.get(f, WHOLE),)).local_shape([size], mesh, at)[0] for f, size in self.sizes.items()}

    def work(self, sizes: Mapping[str, int]) -> int:
        """Return the floating point operations for factors of these sizes: ``local_sizes``, or all of ``sizes``."""
        return sum(term.count(sizes) for term in self.terms)

    def check(
        self, mesh: Mesh, needs: Sequence[DistAttr], gives: Sequence[DistAttr | None], names: Sequence[str]
    ) -> str | None:
        """Return why these attributes are no strategy of the rule; ``None`` if they are."""
        return None if _is_sound(self, mesh, tuple(needs), tuple(gives)) else _mistake(self, mesh, needs, gives, names)


@lru_cache(maxsize=CACHED)
def _place(bound: Bound, strategy: Strategy, mesh: Mesh) -> tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]:
    if bound.rule.layouts is not None:
        return bound.rule.layouts(mesh)
    split, passing = dict(strategy.split), strategy.pending
    operands, results = list[DistAttr](), list[DistAttr | None]()
    for position, dims in enumerate(bound.operands):
        pending: dict[str, str] = {}
        if passing:
            pending = {axis: "sum" for axis, choice in passing if position in bound.linear[choice]}
        for factor, positions in bound.carried.items():
            if factor in split and position in positions:
                pending.update(dict.fromkeys(axes_of(split[factor]), "sum"))
        operands.append(_attr(bound, dims, bound.operand_shapes[position], split, pending, mesh))
    made_of = zip(bound.results, bound.result_shapes, bound._lacking, strict=True)
    for number, (made, size, lacking) in enumerate(made_of):
        if made is None or size is None:
            results.append(None)
            continue
        pending = {} if number in bound.own[1] else dict.fromkeys(dict(passing), "sum")
        for factor, dim in strategy.split:
            if factor in lacking:
                pending.update(dict.fromkeys(axes_of(dim), bound.pattern.kind))
        results.append(_attr(bound, made, size, split, pending, mesh))
    return tuple(operands), tuple(results)


def _attr(
    bound: Bound, dims: Dims, shape: tuple[int, ...], split: Mapping[str, Dim], pending: Mapping[str, str], mesh: Mesh
) -> DistAttr:
    """Return the attribute of a value, in normal form: dim by dim, because most are whole or split as one factor is."""
    rows: list[Dim] = []
    for d, pattern in enumerate(dims):
        if len(pattern) == 1:
            dim = split.get(pattern[0], WHOLE)
        elif split.keys().isdisjoint(pattern):
            dim = WHOLE
        else:
            dim = tuple(
                (bound.sizes[factor] if size is None else size, axes)
                for factor in pattern
                for size, axes in split.get(factor, WHOLE)
            )
        if len(dim) > 1:
            rows.append(normal_dim(dim, shape[d], mesh))
        else:  # a dim of one part is alike in all sizes
            rows.append(normal_dim(((None, dim[0][1]),), 0, mesh) if dim and dim[0][1] else WHOLE)
    return _shared(tuple(rows), tuple(sorted(pending.items())) if pending else (), mesh)


@lru_cache(maxsize=CACHED)
def _shared(dims: tuple[Dim, ...], pending: tuple[tuple[str, str], ...], mesh: Mesh) -> DistAttr:
    """Return an attribute without pending axes of size one, the same object for equal arguments: shapes share them."""
    return DistAttr(dims, tuple([(axis, kind) for axis, kind in pending if mesh.sizes.get(axis) != 1]))


@lru_cache(maxsize=CACHED)
def _has_empty_piece(dim: Dim, size: int, mesh: Mesh) -> bool:
    attr = DistAttr((dim,))
    return any(attr.local_shape([size], mesh, at) == (0,) for at in mesh.points())


@lru_cache(maxsize=CACHED)
def _is_sound(bound: Bound, mesh: Mesh, needs: tuple[DistAttr, ...], gives: tuple[DistAttr | None, ...]) -> bool:
    """Return whether attributes are a strategy of a rule. Layers repeat: cached, without the names of their values."""
    return _mistake(bound, mesh, needs, gives, [""] * len(needs)) is None


def _mistake(
    bound: Bound, mesh: Mesh, needs: Sequence[DistAttr], gives: Sequence[DistAttr | None], names: Sequence[str]
) -> str | None:
    split: dict[str, Dim] = {}
    op = bound.rule.op
    if bound.rule.layouts is not None:
        own = bound.place(Strategy(), mesh)
        wrong = next((n for n, need, want in zip(names, needs, own[0], strict=True) if need != want), None)
        if wrong is not None:
            return f"{op} runs in one choice of layouts alone, and {wrong} has another"
        return (
            None if own[1] == tuple(gives) else f"{op} runs in one choice of layouts alone, and its result has another"
        )
    rows = [(n, d, s, a) for n, d, s, a in zip(names, bound.operands, bound.operand_shapes, needs, strict=True)]
    rows += [
        ("the result", d, s, a)
        for d, s, a in zip(bound.results, bound.result_shapes, gives, strict=True)
        if d is not None and s is not None and a is not None
    ]
    for name, dims, shape, attr in rows:
        for d, splits in enumerate(bound.factor_splits(dims, shape, attr, mesh)):
            if splits is None:
                return f"dim {d} of {name} is not split along the factors of {op}, {bound.pattern}: gather it first"
            for factor, dim in splits.items():
                if axes_of(dim) and factor in bound.whole:
                    return (
                        f"{op} needs the factor {factor} whole ({bound.pattern}), but {name} is split along it "
                        f"over {_over(dim)}: gather it first"
                    )
                if split.setdefault(factor, dim) != dim:
                    return (
                        f"{op} splits the factor {factor} ({bound.pattern}) over {_over(split[factor])} in one "
                        f"place and over {_over(dim)} in {name}: place them alike"
                    )
    passing: dict[str, int] = {}
    carried = {(a, i) for f, dim in split.items() for i in bound.carried.get(f, ()) for a in axes_of(dim)}
    waiting: dict[str, set[int]] = {}
    for position, attr in enumerate(needs):
        for axis, kind in attr.pending:
            if kind != "sum":
                return (
                    f"{op} cannot take {names[position]} pending {kind} over {axis}: insert "
                    f"all_reduce({names[position]}, {axis}, op={kind})"
                )
            waiting.setdefault(axis, set()).add(position)
    for axis, position in carried:
        if position not in waiting.get(axis, ()):
            return (
                f"{op} adds {names[position]} to a sum that is split over {axis}, so it would be counted "
                f"{mesh.sizes[axis]} times: insert pend({names[position]}, {axis})"
            )
    for axis, positions in waiting.items():
        not_carried = positions - {i for a, i in carried if a == axis}
        if not not_carried:
            continue
        choice = next((k for k, alternative in enumerate(bound.linear) if set(alternative) == not_carried), None)
        if choice is None:
            name = names[min(not_carried)]
            return (
                f"{op} is not additive, so {name} must be reduced over {axis} before it: insert "
                f"all_reduce({name}, {axis}), or place {name} differently"
            )
        passing[axis] = choice
    strategy = Strategy(tuple(sorted(split.items())), tuple(sorted(passing.items())))
    for want, have in zip(bound.place(strategy, mesh)[1], gives, strict=True):
        if want != have and want is not None and have is not None:
            if want.pending != have.pending:
                return f"the result of {op} ({bound.pattern}) is {_pending(want)}, not {_pending(have)}"
            return f"the result of {op} has another Layout than its operands and {bound.pattern} imply"
    return None


def axes_of(dim: Dim) -> list[str]:
    """Return every axis that splits a dim."""
    return [axis for _, axes in dim for axis in axes]


def _over(dim: Dim) -> str:
    return "/".join(axes_of(dim)) or "no axis"


def _pending(attr: DistAttr) -> str:
    return "pending " + ", ".join(f"{kind} over {axis}" for axis, kind in attr.pending) if attr.pending else "reduced"
