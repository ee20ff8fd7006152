"""The price of an op: a roofline over its work and its bytes, on the largest pieces, for any split."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costs.machine import Link, Machine, machine
from autopar.costs.op_prices import LOOK_UPS, UNREAD, VIEWS, OpPrices, nanoseconds, op_price
from autopar.ir.layout import Dim, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.rules.binding import bind
from autopar.rules.registry import RULES, find_rule, overload
from autopar.rules.strategies import Bound, Strategy

aten = torch.ops.aten
quick = settings(max_examples=60, deadline=None)

# a microsecond for an op, a nanosecond for a byte, ten operations a nanosecond
PLAIN = Machine("plain", "any", 4, Link(1.0, 1.0), Link(10.0, 0.1), Link(1e-6, 1e9), (("f32", 1e10), ("bf16", 4e10)))
MESH = Mesh(a=2, b=3, c=2)
F32, BF16 = torch.float32, torch.bfloat16


def t(*shape: int, dtype: torch.dtype = F32) -> TensorType:
    return TensorType(shape, dtype)


def bound(name: str, *args: Any, results: Any, **kwargs: Any) -> tuple[Bound, list[TensorType], list[TensorType]]:
    """A bound call, with its operands and results."""
    operands = [one for one in (*args, *kwargs.values()) if isinstance(one, TensorType)]
    results = list(results) if isinstance(results, tuple) else [results]
    return bind(overload(name), args, kwargs, results), operands, results


def over(**axes: str | tuple[str, ...]) -> dict[str, Dim]:
    return {factor: ((None, (one,) if isinstance(one, str) else one),) for factor, one in axes.items()}


def paid(name: str, *args: Any, results: Any, split: dict[str, Dim] | None = None, on: Machine = PLAIN) -> int:
    one, operands, made = bound(name, *args, results=results)
    return op_price(one, split or {}, operands, made, on, MESH)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_longer_of_computing_and_of_reading_and_writing_counts() -> None:
    x = t(100, 100)
    assert paid("mm", x, x, results=x) == 1000 + 2 * 100**3 // 10
    assert paid("mm", t(100, 1), t(1, 100), results=x) == 1000 + 4 * (100 + 100 + 100**2)
    assert paid("add.Tensor", x, t(100), results=x) == 1000 + 4 * (100**2 + 100 + 100**2)
    assert paid("full", [100, 100], 0.0, results=x) == 1000 + 4 * 100**2
    assert paid("zeros_like", x, results=x) == 1000 + 4 * 100**2


def test_the_largest_pieces_count() -> None:
    x = t(400, 400)
    split = over(m=("a", "b"), n="c")  # 67 rows, or 66
    assert paid("mm", x, x, results=x, split=split) == 1000 + 2 * 67 * 200 * 400 // 10
    x = t(100, 100)  # 17 rows, or 16
    assert paid("mm", x, x, results=x, split=split) == 1000 + 4 * (17 * 100 + 50 * 100 + 17 * 50)
    small = t(7, 5)
    assert paid("relu", small, results=small, split=over(**{"...1": "b"})) == 1000 + 2 * 4 * 3 * 5
    parts: dict[str, Dim] = {"...0": ((5, ("a",)), (3, ()), (2, ("b",)))}  # 3 of 5, all of 3, 1 of 2
    assert paid("relu", t(30), results=t(30), split=parts) == 1000 + 2 * 4 * 3 * 3 * 1


def test_the_rate_is_that_of_the_largest_floating_operand() -> None:
    x = t(100, 100, dtype=BF16)
    assert paid("mm", x, x, results=x) == 1000 + max(2 * 100**3 // 40, 2 * 3 * 100**2)
    q, row = t(2, 4, 50, 8, dtype=BF16), t(2, 4, 50)  # the sums of the rows are in float32
    one, operands, made = bound("_scaled_dot_product_flash_attention_for_cpu_backward", q, q, q, q, q, row, 0.0, False,
                                results=(q, q, q))  # fmt: skip
    prices = OpPrices(one, None, [type.dtype for type in operands], [type.dtype for type in made], PLAIN)
    assert (prices.compute, prices.flops) == (BF16, 4e10)
    mixed = OpPrices(bound("mm", t(4, 4), t(4, 4), results=t(4, 4))[0], None, [BF16, F32], [F32], PLAIN)
    assert mixed.compute == F32  # the widest of several
    whole = OpPrices(bound("mm", t(4, 4), t(4, 4), results=t(4, 4))[0], None, [torch.int64] * 2, [torch.int64], PLAIN)
    assert whole.compute == F32


@pytest.mark.parametrize("index", [t(3, dtype=torch.int64), t(1000, dtype=torch.int64)])
def test_a_look_up_reads_what_it_returns(index: TensorType) -> None:
    """And no more than there is."""
    (count,) = index.shape
    read = min(50 * 8, count * 8)
    assert paid("embedding", t(50, 8), index, results=t(count, 8)) == 1000 + 4 * read + 8 * count + 4 * count * 8
    assert paid("index_select", t(50, 8), 0, index, results=t(count, 8)) == 1000 + 4 * read + 8 * count + 4 * count * 8


def test_views_cost_nothing() -> None:
    x = t(100, 100)
    assert paid("t", x, results=x) == paid("view", x, [10000], results=t(10000)) == 0
    assert paid("expand", t(100, 1), [100, 100], results=x) == 0
    assert paid("slice.Tensor", x, 0, 0, 10, results=t(10, 100)) == 0
    assert paid("clone", x, results=x) == paid("flip", x, [0], results=x) == 1000 + 2 * 4 * 100**2


def test_the_tables_of_ops_name_ops_with_rules() -> None:
    """All that torch declares to be views are, and two more, which it declares otherwise for autograd."""
    assert all(find_rule(overload(name)).op == name for name in VIEWS | LOOK_UPS | UNREAD)
    declared = {rule.op for op, rule in RULES.items() if op.is_view}
    assert declared == VIEWS - {"_unsafe_view", "unsafe_split_with_sizes"}


def test_a_machine_without_peaks_has_a_rate() -> None:
    x = t(100, 100)
    none = replace(PLAIN, peak=())
    assert paid("mm", x, x, results=x, on=none) == 1000 + 2 * 100**3 // 16
    assert paid("mm", *[t(100, 100, dtype=BF16)] * 2, results=t(100, 100, dtype=BF16), on=none) == 1000 + 6 * 100**2


def test_nanoseconds_are_rounded_in_one_place() -> None:
    assert [nanoseconds(one) for one in (0.0, 1e-9, 1.4e-9, 1.6e-9, 3.0)] == [0, 1, 1, 2, 3 * 10**9]
    assert all(type(nanoseconds(one)) is int for one in (0, 1e-9, 2))


def test_the_mesh_is_that_of_the_types_or_none() -> None:
    one, operands, made = bound("relu", t(12), results=t(12))
    placed = [TensorType((12,), F32, Layout(MESH, DistAttr.split("a")))]
    assert op_price(one, over(**{"...0": "a"}), placed, made, PLAIN) == 1000 + 2 * 4 * 6
    assert op_price(one, {}, operands, made, PLAIN) == 1000 + 2 * 4 * 12
    with pytest.raises(ValueError, match=r"the factor \.\.\.0 is split, and there is no mesh"):
        op_price(one, over(**{"...0": "a"}), operands, made, PLAIN)
    with pytest.raises(ValueError, match="relu has 1 operands and 1 results, not 2 and 1"):
        op_price(one, {}, operands * 2, made, PLAIN)


# -- properties --------------------------------------------------------------------------------------------------------

CALLS = {
    "mm": lambda n: bound("mm", t(n, n + 1), t(n + 1, 12), results=t(n, 12)),
    "addmm": lambda n: bound("addmm", t(12), t(n, 7), t(7, 12), results=t(n, 12)),
    "bmm": lambda n: bound("bmm", t(n, 5, 6), t(n, 6, 12), results=t(n, 5, 12)),
    "add": lambda n: bound("add.Tensor", t(5, n, 1), t(n, 12), results=t(5, n, 12)),
    "view": lambda n: bound("view", t(n, 12), [n * 12], results=t(n * 12)),
    "sum": lambda n: bound("sum.dim_IntList", t(n, 12), [0], results=t(12)),
    "attention": lambda n: bound("_scaled_dot_product_flash_attention_for_cpu", *[t(n, 12, 5, 4)] * 3,
                                 results=(t(n, 12, 5, 4), t(n, 12, 5))),
    "shared keys": lambda n: bound("_scaled_dot_product_flash_attention_for_cpu", t(n, 12, 5, 4), *[t(n, 4, 5, 4)] * 2,
                                   results=(t(n, 12, 5, 4), t(n, 12, 5))),
    "convolution": lambda n: bound("convolution", t(n, 12, 9), t(6, 4, 2), None, [1], [0], [1], False, [0], 3,
                                   results=t(n, 6, 8)),
    "layer norm": lambda n: bound("native_layer_norm", t(n, 12), [12], t(12), t(12), 1e-5,
                                  results=(t(n, 12), t(n, 1), t(n, 1))),
    "embedding": lambda n: bound("embedding", t(30, 12), t(n, dtype=torch.int64), results=t(n, 12)),
}  # fmt: skip

assignments = st.permutations(["a", "b", "c"])


@st.composite
def splits(draw: st.DrawFn) -> tuple[str, Bound, dict[str, Dim], dict[str, Dim]]:
    """A call, a split of its factors, and the same with one axis more, the minor-most of a factor."""
    name = draw(st.sampled_from(sorted(CALLS)))
    one, *_ = CALLS[name](draw(st.integers(1, 30)))
    factors = sorted(set(one.sizes) - one.whole)
    axes: dict[str, tuple[str, ...]] = {}
    *first, last = draw(assignments)
    for axis in first:
        if (factor := draw(st.sampled_from([*factors, None]))) is not None:
            axes[factor] = (*axes.get(factor, ()), axis)
    more = draw(st.sampled_from(factors))
    further = {**axes, more: (*axes.get(more, ()), last)}
    return name, one, over(**axes), over(**further)


@quick
@given(splits(), st.sampled_from([PLAIN, machine("generic"), machine("cpu"), machine("NVIDIA H100 PCIe")]))
def test_a_price_does_not_grow_when_a_factor_is_split_further(case: Any, on: Machine) -> None:
    _, one, before, after = case
    prices = OpPrices(one, MESH, [F32] * len(one.operands), [F32] * len(one.results), on)
    assert prices.price(after) <= prices.price(before) <= prices.price({})
    assert prices.price(after) >= nanoseconds(on.memory.latency) or prices.free


@quick
@given(splits())
def test_a_price_is_that_of_the_first_ranks_pieces(case: Any) -> None:
    """Work is the rule's for the sizes there, and bytes those of the pieces of all operands and results."""
    name, one, _, split = case
    at = dict.fromkeys(MESH.sizes, 0)
    prices = OpPrices(one, MESH, [F32] * len(one.operands), [F32] * len(one.results), PLAIN)
    work, bytes = prices.work_and_bytes(split)
    assert work == one.work(one.local_sizes(split, MESH, at))
    if name != "embedding":
        needs, gives = one.place(Strategy(tuple(sorted(split.items()))), MESH)
        values = [*zip(one.operand_shapes, needs, strict=True), *zip(one.result_shapes, gives, strict=True)]
        assert bytes == 4 * sum(math.prod(attr.local_shape(shape, MESH, at)) for shape, attr in values)


@quick
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.permutations("abc"), st.integers(0, 3))
def test_work_is_exact_for_even_splits(m: int, k: int, n: int, axes: list[str], count: int) -> None:
    one, *_ = bound("mm", t(12 * m, 12 * k), t(12 * k, 12 * n), results=t(12 * m, 12 * n))
    split = over(**dict(zip("mkn", axes[:count], strict=False)))
    prices = OpPrices(one, MESH, [F32] * 2, [F32], PLAIN)
    assert prices.work_and_bytes(split)[0] * MESH.count(axes[:count]) == one.work(one.sizes) == 2 * 12**3 * m * k * n


def test_a_price_takes_microseconds() -> None:
    """A search asks for hundreds at each op; ten times slower would show there."""
    one, *_ = CALLS["attention"](8)
    prices = OpPrices(one, MESH, [F32] * 3, [F32] * 2, PLAIN)
    split = over(b="a", h=("b", "c"))
    best = math.inf
    for _ in range(5):
        begin = time.process_time()
        for _ in range(500):
            prices.price(split)
        best = min(best, (time.process_time() - begin) / 500)
    assert best < 100e-6
