"""The work of ops: as torch's own counter counts it, on the pieces of a rank too, and what is wrong with a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import autopar
from autopar import RuleError, register_rule
from autopar.ir.layout import Dim
from autopar.ir.mesh import Mesh
from autopar.ir.ops.seeded_random import twin_of
from autopar.ir.record import TensorType
from autopar.rules import RULES
from autopar.rules.binding import bind
from autopar.rules.registry import Term, overload, parse_work, rule
from autopar.rules.strategies import Bound

aten = torch.ops.aten
NONE = None


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def type_of(value: Any) -> Any:
    return TensorType(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def bound(op: Any, *args: Any, results: Any = None, **kwargs: Any) -> Bound:
    """Bind a call; its results are those of the kernel for meta tensors, or given."""
    made = op(*args, **kwargs) if results is None else results
    types = tuple(type_of(one) for one in (made if isinstance(made, (tuple, list)) else (made,)))
    return bind(op, *pytree.tree_map(type_of, (args, kwargs)), types)


def work(op: Any, *args: Any, **kwargs: Any) -> int:
    one = bound(op, *args, **kwargs)
    return one.work(one.sizes)


def counted(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def convolved(
    x: Any, w: Any, transposed: bool = False, groups: int = 1, stride: int = 1, pad: int = 0
) -> tuple[Any, ...]:
    ndim = x.dim() - 2
    return x, w, NONE, [stride] * ndim, [pad] * ndim, [1] * ndim, transposed, [0] * ndim, groups


# -- against torch's counter -------------------------------------------------------------------------------------------

PRODUCTS = {
    "mm": (aten.mm.default, (t(3, 4), t(4, 5))),
    "bmm": (aten.bmm.default, (t(2, 3, 4), t(2, 4, 5))),
    "addmm": (aten.addmm.default, (t(5), t(3, 4), t(4, 5))),
    "baddbmm": (aten.baddbmm.default, (t(3, 5), t(2, 3, 4), t(2, 4, 5))),
    "convolution": (aten.convolution.default, convolved(t(2, 3, 7, 8), t(5, 3, 3, 2))),
    "a convolution with a stride": (aten.convolution.default, convolved(t(2, 3, 9), t(5, 3, 3), stride=2, pad=1)),
    "a convolution in groups": (aten.convolution.default, convolved(t(2, 6, 7), t(9, 2, 3), groups=3)),
    "a depthwise convolution": (aten.convolution.default, convolved(t(2, 6, 7, 7), t(6, 1, 3, 3), groups=6)),
    "a convolution in 3d": (aten.convolution.default, convolved(t(2, 3, 4, 5, 6), t(5, 3, 2, 2, 2))),
    "a transposed convolution": (aten.convolution.default, convolved(t(2, 3, 7), t(3, 5, 3), True, stride=2)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_work_of_a_product_is_what_torch_counts(name: str) -> None:
    op, args = PRODUCTS[name]
    assert work(op, *args) == counted(lambda: op(*args)) > 0


@pytest.mark.parametrize("mask", [(True, True, False), (True, False, False), (False, True, True), (False, False, True)])
@pytest.mark.parametrize("name", [name for name in PRODUCTS if "convolution" in name])
def test_the_work_of_a_convolutions_backward(name: str, mask: tuple[bool, bool, bool]) -> None:
    forward, (x, w, _, *how) = PRODUCTS[name]
    made = aten.convolution_backward.default
    args = (forward(x, w, NONE, *how), x, w, [w.shape[0]], *how, list(mask))
    results = tuple(one if wanted else None for one, wanted in zip((x, w, t(w.shape[0])), mask, strict=True))
    if name == "a transposed convolution":
        results = (*results[:2], results[2] if results[2] is None else t(w.shape[1]))
    forward_work = work(forward, x, w, NONE, *how)
    assert work(made, *args, results=results) == sum(mask[:2]) * forward_work
    if how[-1] == 1 or not mask[1]:  # torch's counter forgets the groups in the gradient of the weight
        assert work(made, *args, results=results) == counted(lambda: made(*args))


def products_of_attention(q: Any, k: Any, v: Any) -> int:
    """Two products, with keys repeated for the heads that share them."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(repeats, 1).flatten(0, 1) for one in (k, v))
    return counted(lambda: q.flatten(0, 1) @ k.transpose(1, 2) @ v)


def gradients_of_attention(q: Any, k: Any, v: Any) -> int:
    q, k, v = (torch.randn(one.shape, requires_grad=True) for one in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    keys, values = (one.repeat_interleave(repeats, 1) for one in (k, v))
    again = counted(lambda: q.detach() @ keys.detach().mT)
    out = (q @ keys.mT).softmax(-1) @ values
    return again + counted(lambda: out.sum().backward())


Q, K, V = t(2, 4, 6, 8), t(2, 4, 10, 8), t(2, 4, 10, 3)
FEW = t(2, 2, 10, 8), t(2, 2, 10, 3)  # keys and values that two heads share
ROW, NUMBER, SEED = t(2, 4, 6), t(dtype=torch.int64), t(2, dtype=torch.int64)
OUT = t(2, 4, 6, 3)
FLASH, EFFICIENT, CUDNN, OTHER = (
    f"_scaled_dot_product_{name}" for name in ("flash_attention", "efficient_attention", "cudnn_attention",
                                               "fused_attention_overrideable")
)  # fmt: skip
LENGTHS = (NUMBER, NUMBER, 6, 10)


def forward_of(name: str, q: Any, k: Any, v: Any, causal: bool) -> int:
    states = (OUT, ROW, NUMBER, NUMBER, NUMBER, NUMBER)
    args, results = {
        f"{FLASH}_for_cpu": ((0.0, causal), (OUT, ROW)),
        FLASH: ((0.0, causal, False), (*states, SEED, NUMBER, t(1))),
        EFFICIENT: ((None, True, 0.0, causal), (OUT, t(2, 4, 32), NUMBER, NUMBER)),
        CUDNN: ((None, True, 0.0, causal), (OUT, t(2, 4, 6, 1), *states[2:], NUMBER, NUMBER, t(1))),
        OTHER: ((None, 0.0, causal), (*states, NUMBER, NUMBER, t(1))),
    }[name]
    return work(overload(name), q, k, v, *args, results=results)


def backward_of(name: str, q: Any, k: Any, v: Any, causal: bool) -> int:
    wide = (True, True, True, False)
    args, results = {
        f"{FLASH}_for_cpu": ((OUT, q, k, v, OUT, ROW, 0.0, causal), (q, k, v)),
        FLASH: ((OUT, q, k, v, OUT, ROW, *LENGTHS, 0.0, causal, SEED, NUMBER), (q, k, v)),
        EFFICIENT: ((OUT, q, k, v, NONE, OUT, t(2, 4, 32), NUMBER, NUMBER, 0.0, wide, causal), (q, k, v, None)),
        CUDNN: ((OUT, q, k, v, OUT, t(2, 4, 6, 1), NUMBER, NUMBER, NONE, *LENGTHS, 0.0, causal), (q, k, v)),
        OTHER: ((OUT, q, k, v, NONE, wide, OUT, ROW, *LENGTHS, 0.0, causal, NUMBER, NUMBER), (q, k, v, None)),
    }[name]
    return work(overload(f"{name}_backward"), *args, results=results)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", [f"{FLASH}_for_cpu", FLASH, EFFICIENT, CUDNN, OTHER])
def test_the_work_of_attention_is_two_products_and_five_backward(name: str, few: bool) -> None:
    k, v = FEW if few else (K, V)
    forward, backward = products_of_attention(Q, k, v), gradients_of_attention(Q, k, v)
    assert forward_of(name, Q, k, v, causal=False) == forward
    assert backward_of(name, Q, k, v, causal=False) == backward
    assert forward_of(name, Q, k, v, causal=True) == forward // 2
    assert backward_of(name, Q, k, v, causal=True) == backward // 2
    packet = getattr(aten, name)
    if packet in flop_registry and not few:
        assert flop_registry[packet](Q, K, V, out_val=(OUT,)) == forward
        back = getattr(aten, f"{name}_backward")
        assert flop_registry[back](OUT, Q, K, V, out_val=(Q, K, V)) == backward


def test_the_work_of_the_causal_attention_with_positions() -> None:
    """Its kernel computes all scores and masks them."""
    rows, own = t(6, dtype=torch.int64), torch.ops.autopar
    forward = work(own.causal_attention.default, Q, K, V, rows, NONE, results=(OUT, ROW))
    assert forward == products_of_attention(Q, K, V)
    backward = work(own.causal_attention_backward.default, OUT, Q, K, V, OUT, ROW, rows, NONE, results=(Q, K, V))
    assert backward == gradients_of_attention(Q, K, V)


ENDS = torch.tensor([2, 6])
AS_PRODUCTS: dict[str, tuple[Any, tuple[Any, ...], Any, Callable[[], object]]] = {  # ops that torch does not count
    "mv": (aten.mv.default, (t(3, 4), t(4)), t(3), lambda: t(3, 4) @ t(4, 1)),
    "addmv": (aten.addmv.default, (t(3), t(3, 4), t(4)), t(3), lambda: t(3, 4) @ t(4, 1)),
    "dot": (aten.dot.default, (t(4), t(4)), t(), lambda: t(1, 4) @ t(4, 1)),
    "vdot": (aten.vdot.default, (t(4), t(4)), t(), lambda: t(1, 4) @ t(4, 1)),
    "addbmm": (aten.addbmm.default, (t(3, 5), t(2, 3, 4), t(2, 4, 5)), t(3, 5), lambda: t(2, 3, 4) @ t(2, 4, 5)),
    "bilinear": (
        aten._trilinear.default, (t(7, 3), t(5, 3, 4), t(7, 4), [1, 3], [0], [1, 2], [2, 3]), t(7, 5),
        lambda: t(5, 7, 3) @ t(5, 3, 4),
    ),
    "tokens by experts": (
        aten._grouped_mm.default, (t(6, 4), t(2, 4, 5), t(2)), t(6, 5),
        lambda: (t(2, 4) @ t(4, 5), t(4, 4) @ t(4, 5)),
    ),
    "experts by tokens": (
        aten._grouped_mm.default, (t(2, 5, 4), t(4, 6), t(2)), t(5, 6), lambda: (t(5, 4) @ t(4, 2), t(5, 4) @ t(4, 4)),
    ),
    "tokens of experts": (
        aten._grouped_mm.default, (t(5, 6), t(6, 4), t(2)), t(2, 5, 4), lambda: (t(5, 2) @ t(2, 4), t(5, 4) @ t(4, 4)),
    ),
    "experts": (
        aten._grouped_mm.default, (t(2, 3, 4), t(2, 4, 5)), t(2, 3, 5), lambda: t(2, 3, 4) @ t(2, 4, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_PRODUCTS)
def test_the_work_of_other_products_is_that_of_equal_ones(name: str) -> None:
    op, args, result, products = AS_PRODUCTS[name]
    assert work(op, *args, results=result) == counted(products) > 0


def test_the_work_of_an_outer_product_and_of_systems() -> None:
    a, b, columns = t(2, 6, 6), t(2, 6), t(2, 6, 5)
    assert work(aten.addr.default, t(3, 4), t(3), t(4)) == 12
    info = t(2, dtype=torch.int32), t(2, 6, dtype=torch.int32)
    assert work(aten.linalg_cholesky_ex.default, a, results=(a, info[0])) == 2 * 6**3 // 3
    assert work(aten.linalg_inv_ex.default, a) == 2 * 2 * 6**3
    assert work(aten.linalg_solve_triangular.default, a, columns, upper=True) == 2 * 6**2 * 5
    solved = work(aten._linalg_solve_ex.default, a, columns, results=(columns, a, info[1], info[0]))
    assert solved == 2 * (2 * 6**3 // 3 + 2 * 6**2 * 5)
    solved = work(aten._linalg_solve_ex.default, a, b, results=(b, a, info[1], info[0]))
    assert solved == 2 * (2 * 6**3 // 3 + 2 * 6**2)


def test_what_only_reads_and_writes_has_no_work() -> None:
    for op, *args in (
        (aten.add.Tensor, t(3, 4), t(4)),
        (aten.t.default, t(3, 4)),
        (aten.embedding.default, t(9, 2), NUMBER),
    ):
        assert work(op, *args) == 0


def test_every_kernel_of_attention_and_every_product_has_work() -> None:
    words = re.compile(r"attention|convolution(_backward)?$|^(add|badd)?(add)?b?mm$|mv$|dot$|_mm$|cdist")
    named = [one for one in RULES.values() if words.search(one.op)]
    assert len(named) > 22 and not [one.op for one in named if not one.work]


# -- on pieces ---------------------------------------------------------------------------------------------------------

MESH = Mesh(a=2, b=3)


@pytest.mark.parametrize("size", [12, 7, 5])
def test_the_work_of_pieces_is_that_of_the_op_on_pieces(size: int) -> None:
    """The largest piece counts if sizes are uneven."""
    whole = bound(aten.mm.default, t(size, 6), t(6, size))
    split: dict[str, Dim] = {"m": ((None, ("a", "b")),), "n": ((None, ("b",)),)}
    largest = -(-size // 6), -(-size // 3)
    at = dict.fromkeys(MESH.sizes, 0)
    assert whole.local_sizes(split, MESH, at) == {"m": largest[0], "n": largest[1], "k": 6}
    pieces = work(aten.mm.default, t(largest[0], 6), t(6, largest[1]))
    assert whole.work(whole.local_sizes(split, MESH, at)) == pieces
    for point in MESH.points():
        assert whole.work(whole.local_sizes(split, MESH, point)) <= pieces


def test_leading_dims_and_missing_operands() -> None:
    named = "test_op_work::scores"
    torch.library.define(named, "(Tensor x, Tensor y, Tensor? z) -> Tensor")
    op = torch.ops.test_op_work.scores.default
    register_rule("... m k, ... n k, n r -> ... m n", named, work="2 ... m n k + 2 n r")
    try:
        x, y, out = t(2, 3, 4, 5), t(2, 3, 6, 5), t(2, 3, 4, 6)
        assert work(op, x, y, t(6, 7), results=out) == 2 * 2 * 3 * 4 * 6 * 5 + 2 * 6 * 7
        assert work(op, x, y, None, results=out) == 2 * 2 * 3 * 4 * 6 * 5
        assert bound(op, x, y, None, results=out).terms[0].factors == ("...1", "...0", "m", "n", "k")
        register_rule("... m k, ... n k, n r -> ... m n", named, work=lambda x, *_: f"{len(x.shape)} ...")
        assert work(op, x, y, None, results=out) == 4 * 6
    finally:
        del RULES[op]


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rules_stay() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def test_a_work_is_a_sum_of_products() -> None:
    assert parse_work("") == parse_work("  ") == ()
    assert parse_work("2 m k n + 1/3 ... i i") == (Term(2, 1, ("m", "k", "n")), Term(1, 3, ("...", "i", "i")))
    assert Term(1, 3, ("i",)).count({"i": 10}) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2 m k q", "rule 'm k, k n -> m n': its work '2 m k q' has the factor 'q', which the rule does not have; it "
                    "has k, m, n"),
        ("2 ... m", "has the factor '...', which the rule does not have"),
        ("2 m k! n", "work '2 m k! n': 'k!' is neither a number nor a factor"),
        ("2 m k n +", "work '2 m k n +': a term between '+' is empty"),
        ("-2 m", "work '-2 m': '-2' is neither a number nor a factor"),
        ("1.5 m", "work '1.5 m': '1.5' is neither"),
        ("1/0 m", "work '1/0 m': '1/0' is neither"),
        ("2 * m", "work '2 * m': '*' is neither"),
    ],
)  # fmt: skip
def test_a_wrong_work_is_refused_when_it_is_registered(text: str, why: str, rules_stay: None) -> None:
    before = dict(RULES)
    for register in (rule, register_rule):
        with pytest.raises(ValueError) as caught:
            register("m k, k n -> m n", "mm", work=text)
        assert why in str(caught.value)
    assert before == RULES


def test_a_work_that_is_wrong_for_a_call(rules_stay: None) -> None:
    for given, why in (
        (lambda *_: "2 m q", "has the factor 'q', which the rule does not have"),
        (lambda *_: 7, "the function that gives the work of mm returned 7; a work is text"),
        (lambda *_: 1 / 0, "the function that gives the work of mm failed: ZeroDivisionError"),
        ("2 m q", "has the factor 'q', which the rule does not have"),
    ):
        autopar.register_rule(lambda *_: "m k, k n -> m n", "mm", work=given)
        with pytest.raises(RuleError, match=re.escape(why)):
            work(aten.mm.default, t(3, 4), t(4, 5))
    with pytest.raises(TypeError, match=r"7 is no work; write one as"):
        register_rule("m k, k n -> m n", "mm", work=7)


def test_the_work_of_a_seeded_op_of_ones_own(rules_stay: None) -> None:
    """Capture replaces it by a twin that takes a seed too; a call that splits nothing has no factors."""
    torch.library.define("test_op_work::noise", "(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    for given in ("5 ...", lambda x: "5 ..."):
        register_rule("... -> ...", "test_op_work::noise", work=given)
        twin = twin_of(overload("test_op_work::noise"))
        assert work(twin, t(3, 4), seed=NUMBER, stream=1, results=t(3, 4)) == 60
        assert work(twin, t(3, 4), seed=t(2, 9), stream=1, results=t(3, 4)) == 0
