"""Bind a rule to the shapes of one call, and derive the Layouts of operands and results from a choice of splits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.errors import RuleError, shown
from autopar.ir.layout import UNDECIDED, WHOLE, Dim, DistAttr, normal_dim, regroup
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of
from autopar.ir.record import TensorType
from autopar.rules.notation import ELLIPSIS, DimPattern, Pattern, parse_pattern
from autopar.rules.registry import Rule, find_rule, parse_linear, rule_of
from autopar.rules.unknown import discovered
from autopar.rules.work import Work, bound_work, check_work
from autopar.torch_private import tensor_arguments

Dims = tuple[DimPattern, ...]


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
    _placements: dict[tuple[Strategy, Mesh], Any] = field(default_factory=dict, repr=False)
    _sound: set[Any] = field(default_factory=set, repr=False)

    @property
    def whole(self) -> frozenset[str]:
        return self.pattern.whole

    def place(self, strategy: Strategy, mesh: Mesh) -> tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]:
        """Return the attributes that a strategy requires of the operands, and those of the results."""
        key = (strategy, mesh)
        if key not in self._placements:
            self._placements[key] = self._place(strategy, mesh)
        return self._placements[key]

    def _place(self, strategy: Strategy, mesh: Mesh) -> tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]:
        split = dict(strategy.split)
        passing = dict(strategy.pending)
        operands, results = list[DistAttr](), list[DistAttr | None]()
        for position, (dims, shape) in enumerate(zip(self.operands, self.operand_shapes, strict=True)):
            pending = {axis for axis, choice in passing.items() if position in self.linear[choice]}
            pending |= {a for f, dim in split.items() if position in self.carried.get(f, ()) for a in axes_of(dim)}
            operands.append(self._attr(dims, shape, split, dict.fromkeys(pending, "sum"), mesh))
        for made, size in zip(self.results, self.result_shapes, strict=True):
            if made is None or size is None:
                results.append(None)
                continue
            results.append(self._attr(made, size, split, self._left_pending(made, split, passing), mesh))
        return tuple(operands), tuple(results)

    def takes(self, factor: str, dim: Dim, mesh: Mesh) -> bool:
        """Return whether the op accepts the pieces of a factor with this split: some rules allow no empty pieces."""
        return self.rule.empty or all(
            DistAttr((dim,)).local_shape([self.sizes[factor]], mesh, at) != (0,) for at in mesh.points()
        )

    def _left_pending(self, dims: Dims, split: Mapping[str, Dim], passing: Mapping[str, int]) -> dict[str, str]:
        """Return the pending axes of a result: those that pass through, and those of the factors that it lacks."""
        has = {factor for dim in dims for factor in dim}
        read = {factor for operand in self.operands for dim in operand for factor in dim}
        kinds = dict.fromkeys(passing, "sum")
        for factor, dim in split.items():
            if factor not in has and factor in read:
                kinds.update(dict.fromkeys(axes_of(dim), self.pattern.kind))
        return kinds

    def _attr(self, dims: Dims, shape: tuple[int, ...], split: Mapping[str, Dim], pending: Mapping[str, str],
              mesh: Mesh) -> DistAttr:  # fmt: skip
        rows = []
        for dim in dims:
            parts = [
                (self.sizes[factor] if size is None else size, axes)
                for factor in dim
                for size, axes in split.get(factor, WHOLE)
            ]
            rows.append(tuple(parts) if len(parts) > 1 else ((None, parts[0][1] if parts else ()),))
        return DistAttr(tuple(rows), tuple(sorted(pending.items()))).normalize(shape, mesh)

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
        return needs[0] if gives[0] == closed else None

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
        """Return why these attributes are no strategy of the rule; ``None`` if they are. Layers repeat: cached."""
        key = (mesh, tuple(needs), tuple(gives))
        if key in self._sound:
            return None
        why = self._check(mesh, needs, gives, names)
        if why is None:
            self._sound.add(key)
        return why

    def _check(
        self, mesh: Mesh, needs: Sequence[DistAttr], gives: Sequence[DistAttr | None], names: Sequence[str]
    ) -> str | None:
        split: dict[str, Dim] = {}
        op = self.rule.op
        rows = [(n, d, s, a) for n, d, s, a in zip(names, self.operands, self.operand_shapes, needs, strict=True)]
        rows += [
            ("the result", d, s, a)
            for d, s, a in zip(self.results, self.result_shapes, gives, strict=True)
            if d is not None and s is not None and a is not None
        ]
        for name, dims, shape, attr in rows:
            for d, splits in enumerate(self.factor_splits(dims, shape, attr, mesh)):
                if splits is None:
                    return f"dim {d} of {name} is not split along the factors of {op}, {self.pattern}: gather it first"
                for factor, dim in splits.items():
                    if axes_of(dim) and factor in self.whole:
                        return (
                            f"{op} needs the factor {factor} whole ({self.pattern}), but {name} is split along it "
                            f"over {_over(dim)}: gather it first"
                        )
                    if split.setdefault(factor, dim) != dim:
                        return (
                            f"{op} splits the factor {factor} ({self.pattern}) over {_over(split[factor])} in one "
                            f"place and over {_over(dim)} in {name}: place them alike"
                        )
        passing: dict[str, int] = {}
        carried = {(a, i) for f, dim in split.items() for i in self.carried.get(f, ()) for a in axes_of(dim)}
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
            choice = next((k for k, alternative in enumerate(self.linear) if set(alternative) == not_carried), None)
            if choice is None:
                name = names[min(not_carried)]
                return (
                    f"{op} is not additive, so {name} must be reduced over {axis} before it: insert "
                    f"all_reduce({name}, {axis}), or place {name} differently"
                )
            passing[axis] = choice
        strategy = Strategy(tuple(sorted(split.items())), tuple(sorted(passing.items())))
        for want, have in zip(self.place(strategy, mesh)[1], gives, strict=True):
            if want != have and want is not None and have is not None:
                if want.pending != have.pending:
                    return f"the result of {op} ({self.pattern}) is {_pending(want)}, not {_pending(have)}"
                return f"the result of {op} has another Layout than its operands and {self.pattern} imply"
        return None


def axes_of(dim: Dim) -> list[str]:
    """Return every axis that splits a dim."""
    return [axis for _, axes in dim for axis in axes]


def _over(dim: Dim) -> str:
    return "/".join(axes_of(dim)) or "no axis"


def _pending(attr: DistAttr) -> str:
    return "pending " + ", ".join(f"{kind} over {axis}" for axis, kind in attr.pending) if attr.pending else "reduced"


_BOUND: dict[Any, Bound] = {}


def bind_node(node: fx.Node, *, strict: bool = False) -> Bound:
    """Return the bound rule of a node, from the records of its operands and its own.

    Without a rule, use the one that is found by running the op (``rules.unknown``), or keep all dims whole.

    Raises:
        RuleError: the rule does not fit the call, or there is none and ``strict`` is set.
    """
    result = record_of(node).type
    results = result if isinstance(result, tuple) else (result,)
    args = tuple(map(typed, node.args))
    kwargs = {key: typed(value) for key, value in node.kwargs.items()}
    return bind(node.target, args, kwargs, results, None if strict else rule_of(node.target))


def typed(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return record_of(value).type
    if isinstance(value, (tuple, list)):
        return tuple(typed(v) for v in value)
    return value


def bind(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorType | None],
         rule: Rule | None = None) -> Bound:  # fmt: skip
    """Bind an op's rule to one call; tensors are given as their types. Calls of equal shapes share the result.

    ``rule`` replaces the registered one.
    """
    rule = rule or find_rule(op)
    key = (rule.op, id(rule), _shapes(args), _shapes(tuple(kwargs.items())), _shapes(tuple(results)))
    if key not in _BOUND:
        _BOUND[key] = _bind(rule, op, args, kwargs, results)
    return _BOUND[key]


def _shapes(value: Any) -> Any:
    if isinstance(value, TensorType):
        return ("tensor", value.shape, value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(v) for v in value)
    return (type(value), value) if isinstance(value, (int, float)) else value


def slots(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the value of each tensor argument of the schema, with lists opened; ``None`` for missing ones."""
    values: list[Any] = []
    for position, name, many in tensor_arguments(op):
        value = args[position] if position < len(args) else kwargs.get(name)
        values += list(value) if many and isinstance(value, (tuple, list)) else [value]
    return values


def _bind(
    rule: Rule, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorType | None]
) -> Bound:
    values = slots(op, args, kwargs)
    why = ""
    if rule.pattern is None:
        finding = discovered(rule, op, args, kwargs, results)
        rule, why = finding.rule or rule, finding.why
    result = _evaluate(rule, args, kwargs) if callable(rule.pattern) else rule.pattern
    work = rule.work if result else ""  # it names factors of the pattern
    result = result or _all_whole(values, results)
    text, sizes = result if isinstance(result, tuple) else (result, {})
    try:
        pattern = parse_pattern(text)
    except ValueError as error:
        raise RuleError(str(error)) from None
    if len(values) != len(pattern.operands):
        raise RuleError(f"rule {text!r} of {rule.op} has {len(pattern.operands)} operands, the op has {len(values)}")
    if len(results) != len(pattern.results):
        raise RuleError(f"rule {text!r} of {rule.op} has {len(pattern.results)} results, the op has {len(results)}")
    present = [k for k, value in enumerate(values) if isinstance(value, TensorType)]
    operand_shapes = tuple(values[k].shape for k in present)
    result_shapes = tuple(None if r is None else r.shape for r in results)
    rows = [(pattern.operands[k], shape) for k, shape in zip(present, operand_shapes, strict=True)]
    rows += [(p, shape) for p, shape in zip(pattern.results, result_shapes, strict=True) if shape is not None]
    expanded = [_expand(dims, len(shape), rule, text, shape) for dims, shape in rows]
    shapes = [shape for _, shape in rows]
    sizes = _sizes(rule, text, expanded, shapes, dict(sizes))
    narrowed = [
        tuple(() if size == 1 and dim and len(dim) == 1 and dim[0].startswith(ELLIPSIS) and sizes[dim[0]] != 1 else dim
              for dim, size in zip(dims, shape, strict=True))
        for dims, shape in zip(expanded, shapes, strict=True)
    ]  # fmt: skip
    narrowed = [tuple(_without_ones(dim, sizes, pattern.whole) for dim in dims) for dims in narrowed]
    operands, result_dims = tuple(narrowed[: len(present)]), iter(narrowed[len(present) :])
    outs = tuple(None if shape is None else next(result_dims) for shape in result_shapes)
    linear = rule.linear(*args, **kwargs) if callable(rule.linear) else rule.linear
    alternatives = tuple(
        tuple(present.index(slot) for slot in alternative)
        for alternative in parse_linear(linear)
        if all(slot in present for slot in alternative)
    )
    return Bound(rule, pattern, sizes, operands, outs, operand_shapes, result_shapes, alternatives,
                 _carried(operands, outs, alternatives), why, _work(rule, pattern, sizes, args, kwargs)
                 if work else ())  # fmt: skip


def _work(
    rule: Rule, pattern: Pattern, sizes: Mapping[str, int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Work:
    """Return the work of a call in the factors of its rule; ``RuleError`` if it has others."""
    text = _call(rule.work, "work", rule, args, kwargs) if callable(rule.work) else rule.work
    if not isinstance(text, str):
        raise RuleError(f"the function that gives the work of {rule.op} returned {shown(text)}; a work is text")
    try:
        check_work(text, pattern)
    except ValueError as error:
        raise RuleError(str(error)) from None
    return bound_work(text, sizes)


def _evaluate(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a rule's function, which may be a user's, and check its result."""
    assert callable(rule.pattern)
    result = _call(rule.pattern, "rule", rule, args, kwargs)
    text = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if not isinstance(text, (str, type(None))):
        raise RuleError(
            f"the function that gives the rule of {rule.op} returned {shown(result)}; a pattern is text, alone or in "
            f"a pair with sizes of factors"
        )
    return result


def _call(function: Callable[..., Any], gives: str, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(
            f"the function that gives the {gives} of {rule.op} failed: {type(error).__name__}: {error}"
        ) from error


def _without_ones(dim: DimPattern, sizes: Mapping[str, int], whole: frozenset[str]) -> DimPattern:
    """Drop whole factors of size one from a merged dim, so that they are not taken for the split factor beside them."""
    left = tuple(factor for factor in dim if sizes[factor] != 1 or factor not in whole)
    return left if len(dim) > 1 and left else dim


def _all_whole(operands: Sequence[Any], results: Sequence[TensorType | None]) -> str:
    """Return a pattern in which all dims stay whole: ``a0! a1!, b0! -> r0! r1!``."""

    def side(values: Sequence[Any], prefix: str) -> str:
        shapes = [value.shape if isinstance(value, TensorType) else () for value in values]
        return ", ".join(
            " ".join(f"{prefix}{k}d{d}!" for d in range(len(shape))) or "()" for k, shape in enumerate(shapes)
        )

    return f"{side(operands, 'x')} -> {side(results, 'y')}"


def _expand(dims: Dims, ndim: int, rule: Rule, text: str, shape: Sequence[int]) -> Dims:
    """Expand ``...`` for a tensor: ``... d`` on three dims is ``...1 ...0 d``, numbered from the right."""
    extra = ndim - (len(dims) - ((ELLIPSIS,) in dims))
    if extra < 0 or (extra and (ELLIPSIS,) not in dims):
        raise RuleError(f"rule {text!r} of {rule.op} does not fit a tensor of shape {list(shape)}")
    leading = [(f"{ELLIPSIS}{k}",) for k in reversed(range(extra))]
    return tuple(itertools.chain.from_iterable(leading if dim == (ELLIPSIS,) else [dim] for dim in dims))


def _sizes(
    rule: Rule, text: str, dims: Sequence[Dims], shapes: Sequence[tuple[int, ...]], sizes: dict[str, int]
) -> dict[str, int]:
    places = [
        (dim, size)
        for value, shape in zip(dims, shapes, strict=True)
        for dim, size in zip(value, shape, strict=True)
        if dim
    ]
    for dim, size in places:  # single factors; in '...' a size-one dim broadcasts
        if len(dim) == 1:
            known = sizes.get(dim[0], size)
            if known != size and not (dim[0].startswith(ELLIPSIS) and 1 in (known, size)):
                raise RuleError(f"rule {text!r} of {rule.op}: the factor {dim[0]} has the sizes {known} and {size}")
            sizes[dim[0]] = size if known == 1 else known
    merged = [(dim, size) for dim, size in places if len(dim) > 1]
    while open_ := [(dim, size) for dim, size in merged if sum(f not in sizes for f in dim) > 0]:
        solvable = next(((d, s) for d, s in open_ if sum(f not in sizes for f in d) == 1), None)
        if solvable is None:
            raise RuleError(
                f"rule {text!r} of {rule.op}: the sizes of {' '.join(open_[0][0])} do not follow; return them with "
                f"the pattern"
            )
        dim, size = solvable
        product = math.prod(sizes[f] for f in dim if f in sizes)
        sizes[next(f for f in dim if f not in sizes)] = size // product if product else 0
    for dim, size in merged:
        if math.prod(sizes[f] for f in dim) != size:
            raise RuleError(f"rule {text!r} of {rule.op}: ({' '.join(dim)}) is not {size}")
    return sizes


def _carried(
    operands: tuple[Dims, ...], results: tuple[Dims | None, ...], linear: tuple[tuple[int, ...], ...]
) -> dict[str, frozenset[int]]:
    """Return factor → operands that lack it and are added to a sum over it: these must be counted only once."""
    has = [{factor for dim in dims for factor in dim} for dims in operands]
    in_results = set().union(*({f for dim in dims for f in dim} for dims in results if dims is not None))
    carried: dict[str, frozenset[int]] = {}
    for factor in set().union(*has) - in_results:
        added = {i for alternative in linear for i in alternative
                 if factor not in has[i] and any(factor in has[j] for j in alternative)}  # fmt: skip
        if added:
            carried[factor] = frozenset(added)
    return carried
