"""Prices: worked examples, monotone in bytes and in ranks, and what a transfer on a mesh comes to."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costs.machine import Link, Machine, Measured, known, machine
from autopar.costs.prices import (
    FORMS,
    SYMBOLS,
    _cached_price,
    algorithm,
    group_shapes,
    price,
    shape_of_group,
    step_price,
)
from autopar.ir import transfers
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType

quick = settings(max_examples=100, deadline=None)

# a second for a message and for a byte inside a node; ten between nodes; local ops half a second
PLAIN = Machine("plain", "any", 4, Link(1.0, 1.0), Link(10.0, 0.1), Link(0.5, 2.0))
MEASURED = replace(
    machine("cpu"), name="measured", ranks_per_node=4,
    measured=tuple(Measured(name, 2, 3e-4, 1e-4, 1e9, 4096.0) for name in ("all_reduce", "all_gather", "reduce_scatter",
        "all_to_all", "send")),
)  # fmt: skip
MACHINES = {one.name: one for one in (*known().values(), PLAIN, MEASURED,
                                      replace(MEASURED, name="in part", measured=MEASURED.measured[:1]),
                                      replace(PLAIN, name="faster outside", outside=Link(0.1, 10.0)))}  # fmt: skip
EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "redistribute", "send", "recv")


# -- the forms ---------------------------------------------------------------------------------------------------------

# by hand: n=24, p=6 on one node (a=2, b=3); k=3, m=2 for what tells nodes apart (a_i=2, b_i=3, a_e=5, b_e=7)
EXAMPLES = {
    ("all_reduce", "ring"): 2 * 5 * 2 + 2 * 5 / 6 * 24 * 3,
    ("all_reduce", "doubling"): 3 * (2 + 24 * 3),
    ("all_reduce", "halving-doubling"): 2 * 3 * 2 + 2 * 5 / 6 * 24 * 3,
    ("all_gather", "ring"): 5 * 2 + 20 * 3,
    ("all_gather", "doubling"): 3 * 2 + 20 * 3,
    ("reduce_scatter", "ring"): 5 * 2 + 20 * 3,
    ("reduce_scatter", "halving"): 3 * 2 + 20 * 3,
    ("all_to_all", "pairwise"): 2 * 2
    + 3 * 5
    + 8 * 3
    + 12 * 7,  # two peers on the node, three elsewhere, four bytes each
    ("all_to_all", "bruck"): 3 * (2 + 12 * 3),
    ("redistribute", "pairwise"): 5 * 2 + 24 * 3,
    ("send", "direct"): 2 + 24 * 3,
    ("recv", "direct"): 2 + 24 * 3,
    ("slice", "local"): 11 + 24 * 13,
    ("pend", "local"): 11 + 24 * 13,
    ("cast", "local"): 11 + 24 * 13,
    ("wait", "local"): 0,
    ("fold_in", "local"): 0,
    ("join_chunks", "local"): 11 + 24 * 13,
}


def test_every_transfer_has_a_form_and_every_form_an_example() -> None:
    assert set(FORMS) == set(transfers.TRANSFERS)
    assert set(EXAMPLES) == {(name, form.algorithm) for name, forms in FORMS.items() for form in forms}
    assert all(form.source for forms in FORMS.values() for form in forms)


@pytest.mark.parametrize(("name", "algorithm"), EXAMPLES)
def test_a_form_is_the_textbooks(name: str, algorithm: str) -> None:
    (form,) = (one for one in FORMS[name] if one.algorithm == algorithm)
    values = (24, 6, 3, 2, 2, 3, 2, 3, 5, 7, 11, 13)
    exact = form.seconds.subs(dict(zip(SYMBOLS, values, strict=True)))
    assert exact.is_Rational and float(exact) == pytest.approx(EXAMPLES[name, algorithm])
    assert float(sympy.lambdify(SYMBOLS, form.seconds, "numpy")(*values)) == pytest.approx(float(exact))


@pytest.mark.parametrize(
    ("name", "bytes", "ranks", "seconds", "by"),
    [
        ("all_reduce", 0, 4, 2, "doubling"),  # two rounds
        ("all_reduce", 100, 4, 4 + 150, "halving-doubling"),
        ("all_reduce", 100, 8, 60 + 1750, "halving-doubling"),  # across nodes
        ("all_gather", 100, 4, 2 + 75, "doubling"),
        ("reduce_scatter", 100, 4, 2 + 75, "halving"),
        ("all_to_all", 100, 4, 3 + 75, "pairwise"),
        ("all_to_all", 2, 4, 2 * (1 + 1), "bruck"),
        ("redistribute", 100, 4, 3 + 100, "pairwise"),
        ("send", 100, 2, 1 + 100, "direct"),
        ("recv", 100, 5, 10 + 1000, "direct"),  # the fifth rank is on another node
        ("cast", 100, 1, 0.5 + 50, "local"),
        ("slice", 100, 2, 0.5 + 50, "local"),
        ("wait", 100, 2, 0, "none"),
    ],
)
def test_worked_examples(name: str, bytes: int, ranks: int, seconds: float, by: str) -> None:
    assert price(name, bytes, ranks, PLAIN) == pytest.approx(seconds)
    assert algorithm(name, bytes, ranks, PLAIN) == by
    assert price(transfers.TRANSFERS[name].function, bytes, ranks, PLAIN) == price(name, bytes, ranks, PLAIN)


def test_bytes_are_counted_once() -> None:
    """An all-reduce of much takes 2 (p-1)/p of it, not input and output; an all-to-all half of that."""
    n, p = 10**9, 4
    assert price("all_reduce", n, p, PLAIN) / n == pytest.approx(2 * 3 / 4, rel=1e-6)
    assert price("all_to_all", n, p, PLAIN) / n == pytest.approx(3 / 4, rel=1e-6)
    assert price("all_gather", n, p, PLAIN) + price("reduce_scatter", n, p, PLAIN) == pytest.approx(
        price("all_reduce", n, p, PLAIN)
    )


def test_a_shape_is_that_of_full_nodes_unless_given() -> None:
    for ranks in range(1, 20):
        full = (min(ranks, 4), -(-ranks // 4))
        assert price("all_reduce", 1000, ranks, PLAIN) == price("all_reduce", 1000, ranks, PLAIN, shape=full)
    assert price("all_reduce", 1000, 4, PLAIN, shape=(2, 2)) == 2 * 2 * 10 + 1.5 * 10000  # by the slowest link


# -- monotone ----------------------------------------------------------------------------------------------------------

sizes = st.integers(0, 1 << 40)
counts = st.integers(1, 1 << 12)


@pytest.mark.simulated
@pytest.mark.parametrize("name", FORMS)
@quick
@given(st.sampled_from(sorted(MACHINES)), sizes, sizes, counts, counts, st.integers(1, 16))
def test_a_price_is_monotone(name: str, of: str, n: int, more: int, p: int, others: int, k: int) -> None:
    """In bytes at any ranks, in ranks at any bytes, on nodes of the machine's size; and in nodes of any size."""
    one = MACHINES[of]
    here = price(name, n, p, one)
    assert 0 <= here <= price(name, n + more, p, one)
    assert here <= price(name, n, p + 1, one) <= price(name, n, p + others, one)
    assert price(name, n, k * p, one, shape=(k, p)) <= price(name, n, k * (p + others), one, shape=(k, p + others))


@pytest.mark.parametrize("of", MACHINES)
@pytest.mark.parametrize("name", FORMS)
def test_no_step_goes_down(name: str, of: str) -> None:
    """From one number of ranks to the next, and from one size to the next; with nothing to send, or nobody to send
    to."""
    one = MACHINES[of]
    table = price(name, 2.0 ** np.arange(36)[:, None], np.arange(1, 200), one)
    assert np.all(np.diff(table, axis=0) >= 0) and np.all(np.diff(table, axis=1) >= 0)
    endless = {link: replace(getattr(one, link), bandwidth=1e30) for link in ("inside", "outside", "memory")}
    nothing = price(name, 0, np.arange(1, 200), one)
    assert np.all(nothing <= table[0])
    assert one.measured or np.array_equal(nothing, price(name, 0, np.arange(1, 200), replace(one, **endless)))
    assert name == "cast" or not table[:, 0].any()
    assert name in ("wait", "fold_in") or np.all(table[:, 1:] > 0)


@pytest.mark.simulated
@quick
@given(
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(sorted(MACHINES)),
    st.lists(sizes, min_size=1, max_size=4),
    st.lists(counts, min_size=1, max_size=4),
)
def test_arrays_are_priced_as_numbers_are(name: str, of: str, n: list[int], p: list[int]) -> None:
    table = price(name, np.array(n)[:, None], np.array(p), MACHINES[of])
    assert table.shape == (len(n), len(p))
    alone = [[price(name, one, other, MACHINES[of]) for other in p] for one in n]
    assert all(isinstance(one, float) for row in alone for one in row)
    assert table.tolist() == alone
    k = [min(other, 2) for other in p]
    shape = (np.array(k), np.array([-(-a // b) for a, b in zip(p, k, strict=True)]))
    assert price(name, n[0], np.array(p), MACHINES[of], shape=shape).tolist() == [
        price(name, n[0], a, MACHINES[of], shape=(b, -(-a // b))) for a, b in zip(p, k, strict=True)
    ]


@pytest.mark.parametrize("of", MACHINES)
@pytest.mark.parametrize("name", FORMS)
def test_the_price_of_numbers_is_that_of_arrays(name: str, of: str) -> None:
    """To the last bit, since prices are compared."""
    machine = MACHINES[of]
    for bytes, ranks in itertools.product((0, 1, 1000, 12345678, 3 << 28), (1, 2, 3, 5, 8, 12, 24, 100)):
        assert _cached_price(name, bytes, ranks, machine) == price(name, bytes, ranks, machine)
        shapes = ((2, -(-ranks // 2)), (ranks, 1), (1, ranks), (min(3, ranks), -(-ranks // 3))) if ranks > 1 else ()
        for shape in shapes:
            found = _cached_price(name, bytes, ranks, machine, shape=shape)
            assert found == price(name, bytes, ranks, machine, shape=shape)


# -- measured ----------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_the_price() -> None:
    n = np.array([0, 1, 1000, 10**5, 10**6, 10**9])
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"):
        seconds = [max(3e-4, 1e-4 + (one + 4096) / 1e9) for one in n.tolist()]
        assert price(name, n, 2, MEASURED).tolist() == pytest.approx(seconds)
        assert MEASURED.fit("send").seconds(n).tolist() == pytest.approx(seconds)
        assert algorithm(name, 10**6, 2, MEASURED) == "measured"
    for name in ("all_gather", "all_to_all"):
        # three messages for one, 3/4 for 1/2
        assert price(name, 10**9, 4, MEASURED) == pytest.approx(3 * (1e-4 + 4096 / 1e9) + 1.5)
        assert price(name, 0, 3, MEASURED) == pytest.approx(2 * 3e-4)
    # all of it travels, not half
    assert price("redistribute", 10**9, 2, MEASURED) == pytest.approx(1e-4 + 4096 / 1e9 + 2)


def test_only_what_was_measured_is() -> None:
    part = MACHINES["in part"]
    assert (
        algorithm("all_reduce", 10**6, 4, part) == "measured" and algorithm("all_gather", 10**6, 4, part) == "doubling"
    )
    assert price("all_gather", 10**6, 4, part) == price("all_gather", 10**6, 4, replace(part, measured=()))
    slow = replace(PLAIN, measured=(Measured("all_reduce", 2, 1e9, 0.0, 1.0, 0.0),))
    assert price("all_reduce", 1, 9, slow) == price("all_reduce", 1, 4, slow) == 3e9  # no less than on a full node
    assert algorithm("all_reduce", 1, 5, PLAIN) == algorithm(
        "all_reduce", 1, 5, replace(part, inside=PLAIN.inside, outside=PLAIN.outside)
    )


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bytes", "ranks", "shape", "text"),
    [
        ("broadcast", 1, 2, None, f"broadcast is no transfer with a price; there are {', '.join(FORMS)}"),
        (math.sqrt, 1, 2, None, "sqrt is no transfer with a price; there are "),
        ("send", -1, 2, None, "send: bytes are ≥ 0, not -1"),
        ("send", float("nan"), 2, None, "send: bytes are ≥ 0, not nan"),
        ("send", 1, 0, None, "send: ranks are ≥ 1, not 0"),
        ("send", [1, 2], [2, 0], None, "send: ranks are ≥ 1, not [2, 0]"),
        (
            "all_reduce",
            1,
            5,
            (2, 2),
            "all_reduce: 5 ranks do not fit on nodes of the shape (2, 2), (ranks on a node, nodes)",
        ),
        (
            "all_reduce",
            1,
            2,
            (4, 1),
            "all_reduce: 2 ranks do not fit on nodes of the shape (4, 1), (ranks on a node, nodes)",
        ),
    ],
)
def test_what_has_no_price(name: str, bytes: int, ranks: int, shape: tuple[int, int] | None, text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        price(name, bytes, ranks, PLAIN, shape=shape)


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def test_the_shape_of_a_group() -> None:
    assert shape_of_group(range(8), 8) == (8, 1)
    assert shape_of_group(range(16), 8) == (8, 2)
    assert shape_of_group((0, 8, 16, 24), 8) == (1, 4)
    assert shape_of_group((6, 7, 8), 8) == (2, 2)
    assert shape_of_group((3,), 8) == (1, 1)


def test_the_shapes_of_the_groups_of_a_mesh() -> None:
    mesh = Mesh(dp=4, tp=4)
    assert group_shapes(mesh, ("tp",), 8) == ((4, 1),)
    assert group_shapes(mesh, ("dp",), 8) == ((2, 2),)
    assert group_shapes(mesh, ("dp", "tp"), 8) == group_shapes(mesh, ("tp", "dp"), 8) == ((8, 2),)
    assert group_shapes(Mesh(dp=2, tp=3), ("tp",), 4) == ((2, 2), (3, 1))  # ranks 0-2 on one node, 3-5 on two
    assert group_shapes(Mesh(dp=2, ranks=[0, 9]), ("dp",), 8) == ((1, 2),)
    with pytest.raises(ValueError, match="has no axis 'pp'"):
        group_shapes(mesh, ("pp",), 8)


def value(
    mesh: Mesh, *axes: object, shape: tuple[int, ...] = (24, 64), dtype: torch.dtype = torch.float32, **more: object
) -> TensorType:
    return TensorType(shape, dtype, Layout(mesh, DistAttr.split(*axes, **more)))


def paid(function: object, operand: TensorType, /, **given: object) -> float:
    meshes = {
        "s1": Mesh(dp=2, tp=2, ranks=[4, 5, 6, 7], name="s1"),
        "s0": Mesh(dp=2, tp=2, ranks=[0, 2, 1, 3], name="s0"),
    }
    result = transfers.BY_FUNCTION[function].infer(operand, given, meshes)
    return step_price(function, operand, given, result, PLAIN)


def test_the_price_of_a_transfer_on_a_mesh() -> None:
    mesh, whole = Mesh(dp=2, tp=2), 24 * 64 * 4
    assert paid(transfers.all_reduce, value(mesh, None, None, pending=["tp"]), axis="tp") == price(
        "all_reduce", whole, 2, PLAIN
    )
    assert paid(transfers.all_reduce, value(mesh, "dp", None, pending=["tp"]), axis="tp") == price(
        "all_reduce", whole / 2, 2, PLAIN
    )
    both = value(mesh, None, None, pending=["dp", "tp"])
    assert paid(transfers.all_reduce, both, axis=("dp", "tp")) == price("all_reduce", whole, 4, PLAIN)
    assert paid(transfers.all_gather, value(mesh, "dp", "tp"), dim=0, axis="dp") == price(
        "all_gather", whole / 2, 2, PLAIN
    )
    assert paid(transfers.reduce_scatter, value(mesh, None, None, pending=["tp"]), dim=0, axis="tp") == price(
        "reduce_scatter", whole, 2, PLAIN
    )
    assert paid(transfers.all_to_all, value(mesh, "tp", None), source=0, target=1, axis="tp") == price(
        "all_to_all", whole / 2, 2, PLAIN
    )
    # half is read, and written
    assert paid(transfers.slice, value(mesh, None, None), dim=0, axis="tp") == price("slice", whole, 2, PLAIN)
    assert paid(transfers.pend, value(mesh, "dp", None), axis="tp") == price("pend", whole / 2, 2, PLAIN)
    assert paid(transfers.cast, value(mesh, "dp", None), dtype=torch.bfloat16) == price(
        "cast", whole / 2 * 1.5, 1, PLAIN
    )
    assert paid(transfers.wait, value(mesh, "dp", None)) == 0
    narrow = replace(value(mesh, None, None, pending=["tp"]), dtype=torch.int16)  # reduced as int32
    assert paid(transfers.all_reduce, narrow, axis="tp") == price("all_reduce", whole, 2, PLAIN)
    assert paid(transfers.reduce_scatter, narrow, dim=0, axis="tp") == price("reduce_scatter", whole, 2, PLAIN)
    swapped = paid(transfers.redistribute, value(mesh, "dp", "tp"), splits=(("tp",), ("dp",)))
    assert swapped == price("redistribute", whole / 4, 2, PLAIN)  # two ranks keep what they have, two exchange all


def test_uneven_pieces_are_priced_as_the_largest() -> None:
    mesh = Mesh(tp=4)
    for shape in ((5, 8), (6, 8), (8, 8)):  # pieces 2 2 1 0, 2 2 2 0, 2 2 2 2
        assert paid(transfers.all_gather, value(mesh, "tp", None, shape=shape), dim=0, axis="tp") == price(
            "all_gather", 4 * 2 * 8 * 4, 4, PLAIN
        )
        source = value(mesh, None, None, shape=shape, pending=["tp"])
        assert paid(transfers.reduce_scatter, source, dim=0, axis="tp") == price(
            "reduce_scatter", 4 * 2 * 8 * 4, 4, PLAIN
        )


def test_a_group_pays_for_where_it_stands() -> None:
    mesh, whole = Mesh(dp=2, tp=4), 24 * 64 * 4
    near = paid(transfers.all_reduce, value(mesh, None, None, pending=["tp"]), axis="tp")
    far = paid(transfers.all_reduce, value(mesh, None, None, pending=["dp"]), axis="dp")
    assert near == price("all_reduce", whole, 4, PLAIN)
    assert far == price("all_reduce", whole, 2, PLAIN, shape=(1, 2)) > 5 * near
    uneven = paid(transfers.all_reduce, value(Mesh(dp=2, tp=3), None, None, pending=["tp"]), axis="tp")
    assert (
        uneven
        == price("all_reduce", whole, 3, PLAIN, shape=(2, 2))
        > price("all_reduce", whole, 3, PLAIN, shape=(3, 1))
    )
    there = value(Mesh(dp=2, tp=2, ranks=[0, 4, 1, 5]), "dp", "tp")
    assert paid(transfers.redistribute, there, splits=(("tp",), ("dp",))) == price(
        "redistribute", whole / 4, 2, PLAIN, shape=(1, 2)
    )


@pytest.mark.parametrize(
    "ranks",
    [
        [0, 1, 2, 5, 4, 8, 6, 9],  # ranks 2 and 4 exchange, 5 and 8 do; 5 and 4 must not: they hold other addends
        [0, 1, 2, 5, 4, 6, 7, 8],  # 2 and 4 do, on two nodes, and 5 and 6, on one
    ],
)
def test_a_pending_value_is_exchanged_among_those_with_like_addends(ranks: list[int]) -> None:
    source = value(Mesh(dp=2, tp=2, pp=2, ranks=ranks), "dp", "tp", pending=["pp"])
    far = price("redistribute", 24 * 64, 2, PLAIN, shape=(1, 2))
    assert paid(transfers.redistribute, source, splits=(("tp",), ("dp",))) == far


def test_a_message_is_paid_once() -> None:
    source, whole = value(Mesh(dp=2, tp=2, ranks=[0, 1, 2, 3], name="s0"), "dp", "tp"), 24 * 64 * 4
    assert paid(transfers.send, source, stage="s1") == 0
    # ranks 4-7 are another node
    assert paid(transfers.recv, source, stage="s1") == price("recv", whole / 4, 2, PLAIN, shape=(1, 2))
    assert paid(transfers.recv, source, stage="s0") == price("recv", whole / 4, 2, PLAIN)
    gathered = paid(transfers.recv, source, stage="s1", splits=((), ()))  # each gets four pieces, from four ranks
    assert gathered == price("redistribute", whole, 5, PLAIN, shape=(1, 5))
    one = value(Mesh(dp=1, ranks=[0], name="one"), None, None)
    # the sender has most
    assert paid(transfers.recv, one, stage="s1", splits=((), ())) == price(
        "redistribute", 4 * whole, 5, PLAIN, shape=(1, 5)
    )


def test_a_value_without_a_layout_is_only_cast() -> None:
    bare = TensorType((4, 4), torch.float32)
    assert step_price(
        transfers.cast, bare, {"dtype": torch.float64}, replace(bare, dtype=torch.float64), PLAIN
    ) == price("cast", 64 + 128, 1, PLAIN)
    with pytest.raises(ValueError, match=re.escape("all_reduce exchanges values on a mesh; TensorType(shape=(4, 4)")):
        step_price(transfers.all_reduce, bare, {"axis": "tp"}, bare, PLAIN)
