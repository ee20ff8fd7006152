"""Bind a rule to the shapes of one call, and find the ops that draw the same numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from torch import fx

from autopar.errors import RuleError, shown
from autopar.ir.layout import Dim, normal_dim
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import element_of, is_getitem, operands, record_of
from autopar.ir.ops.seeded_random import is_seeded_random
from autopar.ir.record import TensorType
from autopar.rules.notation import ELLIPSIS, OWN_DIMS, DimPattern, Pattern, parse_pattern
from autopar.rules.registry import Rule, Work, bound_work, check_work, find_rule, parse_linear, rule_of
from autopar.rules.strategies import Bound, Dims, axes_of
from autopar.rules.unknown import discovered
from autopar.torch_private import tensor_arguments

CACHED = 16384  # the most bound rules that are kept: a step calls its ops with a few hundred different shapes


@dataclass(frozen=True)
class _Call:
    """One call of an op; calls with the same key have the same bound rule."""

    key: Any
    rule: Rule = field(compare=False)
    op: Any = field(compare=False)
    arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]] = field(compare=False)
    results: Sequence[TensorType | None] = field(compare=False)


def bind_node(node: fx.Node, *, strict: bool = False) -> Bound:
    """Return the bound rule of a node, from the records of its operands and its own.

    Without a rule, use the one that is found by running the op (``rules.unknown``), or keep all dims whole.

    Raises:
        RuleError: the rule does not fit the call, or there is none and ``strict`` is set.
    """
    result = record_of(node).type
    results = result if isinstance(result, tuple) else (result,)
    given = node.kwargs
    rule = (None if strict else rule_of(node.target)) or find_rule(node.target)
    key = (rule.op, id(rule), _shapes(node.args), _shapes(tuple(given.items())) if given else (), _shapes(results))
    return _bind(_Call(key, rule, node.target, lambda: _typed(node), results))


def _typed(node: fx.Node) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a node, with types in the place of its operands."""
    return tuple(map(typed, node.args)), {name: typed(value) for name, value in node.kwargs.items()}


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
    return _bind(_Call(key, rule, op, lambda: (args, kwargs), results))


def _shapes(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = record_of(value).type
    if isinstance(value, TensorType):
        return ("tensor", value.shape, value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple([_shapes(v) for v in value])
    return (type(value), value) if isinstance(value, (int, float)) else value


def slots(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the value of each tensor argument of the schema, with lists opened; ``None`` for missing ones."""
    values: list[Any] = []
    for position, name, many in tensor_arguments(op):
        value = args[position] if position < len(args) else kwargs.get(name)
        values += list(value) if many and isinstance(value, (tuple, list)) else [value]
    return values


@lru_cache(maxsize=CACHED)
def _bind(call: _Call) -> Bound:
    rule, op, results = call.rule, call.op, call.results
    args, kwargs = call.arguments()
    values = slots(op, args, kwargs)
    why = ""
    if rule.pattern is None:
        finding = discovered(rule, op, args, kwargs, results)
        rule, why = finding.rule or rule, finding.why
    result = _evaluate(rule, args, kwargs) if callable(rule.pattern) else rule.pattern
    work = rule.work if result else ""  # it names factors of the pattern
    result = result or _all_whole(values, results)
    if rule.layouts is not None:
        rule = replace(rule, layouts=partial(rule.layouts, args, results))
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
    expanded = [
        tuple((f"own{k}.{d}",) for d in range(len(shape))) if dims == OWN_DIMS
        else _expand(dims, len(shape), rule, text, shape)
        for k, (dims, shape) in enumerate(rows)
    ]  # fmt: skip
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
    own = (
        frozenset(n for n, k in enumerate(present) if pattern.operands[k] == OWN_DIMS),
        frozenset(k for k, dims in enumerate(pattern.results) if dims == OWN_DIMS),
    )
    return Bound(rule, pattern, sizes, operands, outs, operand_shapes, result_shapes, alternatives,
                 _carried(operands, outs, alternatives), why, _work(rule, pattern, sizes, args, kwargs)
                 if work else (), own)  # fmt: skip


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


# -- drawn -------------------------------------------------------------------------------------------------------------
#
# Find the ops that must be split alike, because they draw the same random numbers.


Splits = tuple[tuple[str, Dim], ...]


def drawn_alike(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return op → an earlier op like which it must be split.

    That is, for a random op, the first one of its stream, of which it is a recomputed copy; and for the backward of a
    kernel that draws its dropout itself, that kernel, whose own state it reads.
    """
    first: dict[tuple[object, ...], fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if is_seeded_random(node.target):
            types = record_of(node).type
            shapes = tuple([t and t.shape for t in types]) if isinstance(types, tuple) else types and types.shape
            of_stream = first.setdefault((node.kwargs["seed"], node.kwargs["stream"], node.target, shapes), node)
            if of_stream is not node:
                found[node] = of_stream
        elif first and node.op == "call_function" and not is_getitem(node):
            made_by = (own_maker(value) for value in operands(node))
            kernel = next((op for op in made_by if op is not None and is_seeded_random(op.target)), None)
            if kernel is not None:
                found[node] = kernel
    return found


def own_maker(value: fx.Node) -> fx.Node | None:
    """Return the op that leaves this value on each rank as its own (``own`` in a rule); ``None`` if it is data."""
    if not is_getitem(value):
        return None
    op, index = element_of(value)
    return op if index in bind_node(op).own[1] else None


def splits_in_common(bound: Bound, split: Mapping[str, Dim], other: Bound, mesh: Mesh) -> Splits:
    """Return the splits of the factors that two ops have in common, in normal form."""
    normal = {f: normal_dim(dim, bound.sizes[f], mesh) for f, dim in split.items() if f in other.sizes}
    return tuple(sorted((f, dim) for f, dim in normal.items() if axes_of(dim)))


def split_of(node: fx.Node) -> dict[str, Dim]:
    """Return the split of each factor of an op of a placed program."""
    record = record_of(node)
    types = record.type if isinstance(record.type, tuple) else (record.type,)
    needs = [need.placed.attr for need in record.uses if need is not None]
    mesh = next(t.mesh for t in types if t is not None)
    return bind_node(node).splits(needs, [None if t is None else t.attr for t in types], mesh)
