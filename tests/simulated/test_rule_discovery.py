"""The rule of an op without one is found by running it on pieces, or the reason is told why not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from black_boxes import INDEX, T, define
from operands import made
from rule_calls import TABLE
from torch.nn import functional

from autopar import register_rule
from autopar.errors import ProofError
from autopar.ir.record import TensorType
from autopar.rules.binding import bind
from autopar.rules.registry import RULES, Rule, overload, rule_of
from autopar.runtime.discovery import discover as module
from autopar.runtime.discovery.discover import Finding, discover
from autopar.runtime.discovery.proof import prove
from autopar.torch_private import OpOverload, pytree


def found(op: OpOverload, *args: Any, **kwargs: Any) -> Finding:
    """What is found out about a call, given by types."""
    like = pytree.tree_map(_meta, (args, kwargs), is_leaf=lambda value: isinstance(value, TensorType))
    results = op(*like[0], **like[1])
    types = [T(*one.shape, dtype=one.dtype) for one in (results if isinstance(results, (tuple, list)) else [results])]
    return discover(Rule(op.name(), None), op, args, kwargs, types)


def _meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, TensorType) else value


def rule_found(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[str, str]:
    finding = found(op, *args, **kwargs)
    assert finding.rule is not None, finding.why
    return str(finding.rule.pattern), str(finding.rule.linear)


def crossed(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    turned = torch.cat([-x[..., 1::2], x[..., ::2]], -1)
    return x * p[..., None].cos() + turned * p[..., None].sin()


def contiguous_only(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).exp().view(x.shape)


def below(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * (torch.arange(x.shape[1], device=x.device) < k)[:, None]


X = T(64, 128, 512)
OPS: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    # schema, kernel, arguments, keywords, the pattern that is found
    ("swish(Tensor x) -> Tensor", lambda x: x * x.sigmoid(), (X,), {}, "... -> ..."),
    ("twice(Tensor x) -> Tensor", lambda x: x * 2, (X,), {}, "... -> ..."),
    ("steps(Tensor x) -> Tensor", torch.ceil, (X,), {}, "... -> ..."),
    ("rows(Tensor x) -> Tensor", lambda x: x.softmax(-1), (X,), {}, "... c! -> ... c!"),
    ("rows_scaled(Tensor x, Tensor w) -> "
     "Tensor", lambda x, w: x.softmax(-1) * w, (X, T(512)), {}, "a b c!, c! -> a b c!"),
    ("product(Tensor x, Tensor w) -> "
     "Tensor", lambda x, w: x @ w, (T(64, 512), T(512, 256)), {}, "a b, b c -> a c"),
    ("square(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w, (T(64, 64), T(64, 64)), {}, "a b, b c -> a c"),
    ("biased(Tensor x, Tensor w, Tensor? b=None) -> "
     "Tensor", functional.linear, (X, T(256, 512)), {}, "a b c, d c, () -> a b d"),
    ("total(Tensor x) -> Tensor", lambda x: x.sum(), (X,), {}, "... -> ()"),
    ("highest(Tensor x) -> Tensor", lambda x: x.amax(1), (X,), {}, "... b c -> ... c by max"),
    ("lowest(Tensor x) -> Tensor", lambda x: x.amin(1), (X,), {}, "... b c -> ... c by min"),
    ("two(Tensor x) -> (Tensor, Tensor)", lambda x: (x.exp(), x.sum(-1)), (X,), {}, "... c -> ... c, ..."),
    ("listed(Tensor[] xs, *, Tensor w) -> "
     "Tensor", lambda xs, w: sum(xs) * w, ([X, X],), {"w": T(512)}, "a b c, a b c, c -> a b c"),
    ("dense(Tensor x) -> Tensor", contiguous_only, (X,), {}, "... -> ..."),
    ("turned(Tensor x) -> Tensor", lambda x: x.transpose(0, 1).clone(), (X,), {}, "a b c -> b a c"),
    ("rope(Tensor x, Tensor p) -> Tensor", crossed, (X, T(64, 128, dtype=INDEX)), {}, "... c!, ... -> ... c!"),
    ("split_heads(Tensor x, int heads) -> "
     "Tensor", lambda x, heads: x.unflatten(-1, (heads, -1)).clone(), (X, 32), {}, "... c! -> ... d! e!"),
    ("below(Tensor x, int k) -> Tensor", below, (X, 64), {}, "... b! c -> ... b! c"),
    ("looked_up(Tensor w, Tensor i) -> "
     "Tensor", lambda w, i: w[i], (T(1000, 64), T(4, 128, dtype=INDEX)), {}, "a! b, c d -> c d b"),
    ("furthest(Tensor x, Tensor p) -> "
     "Tensor", lambda x, p: x * p[..., None] / p.max(), (X, T(64, 128, dtype=INDEX)), {},
     "a! b! c, a! b! -> a! b! c"),
    ("if_any(Tensor x, Tensor m) -> "
     "Tensor", lambda x, m: torch.where(m.any(), x, -x), (T(64, 32), T(64, 32, dtype=torch.bool)), {},
     "a b, c! d! -> a b"),
    ("causal(Tensor q, Tensor k, Tensor v) -> "
     "Tensor", lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
     (T(8, 4, 32, 16),) * 3, {}, "... c! d!, ... c! d!, ... c! d! -> ... c! d!"),
    ("gradients(Tensor g, Tensor x, Tensor w) -> (Tensor, "
     "Tensor)", lambda g, x, w: (g @ w, g.T @ x), (T(32, 64), T(32, 128), T(64, 128)), {},
     "a b, a c!, b c! -> a c!, b c!"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "compute", "args", "kwargs", "pattern"), OPS, ids=[row[0].partition("(")[0] for row in OPS]
)
def test_what_is_found(schema: str, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: str) -> None:
    """No operand is linear: samples do not show that for all values."""
    op = define(schema, compute)
    assert rule_found(op, *args, **kwargs) == (pattern, "")


REACTING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros_unless_finite": lambda x: torch.where(x.isfinite().all(), x, torch.zeros_like(x)),
    "zeros_if_nan": lambda x: torch.where(x.isnan().any(), torch.zeros_like(x), x),
    "scaled_when_large": lambda x: torch.where(x.abs().max() > 65504, x * 65504 / x.abs().max(), x),
    "ones_for_zeros": lambda x: torch.where(
        (x == 0).all(), torch.arange(x.numel(), dtype=x.dtype, device=x.device).view_as(x), x
    ),
}


@pytest.mark.parametrize("name", REACTING)
def test_what_reacts_to_values_is_not_split(name: str) -> None:
    assert found(define(f"{name}(Tensor x) -> Tensor", REACTING[name]), X).rule is None


def test_a_bias_is_counted_once() -> None:
    """The dim that is summed over stays whole beside a bias, which each rank would add."""
    op = define("summed(Tensor x, Tensor w, Tensor b) -> Tensor", functional.linear)
    assert rule_found(op, X, T(256, 512), T(256)) == ("a b c!, d c!, d -> a b d", "")


class Calls:
    """A kernel that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


def crash(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x) if x.is_meta else ctypes.string_at(0)


def write(x: torch.Tensor) -> torch.Tensor:
    if x.is_meta:
        return torch.empty_like(x)
    x[0] = 0
    return x + 1


def narrow_only(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        raise TypeError("float32 alone")
    return x * 2


NOTHING: list[tuple[str, Callable[..., Any], str]] = [
    ("drawn(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x), "it draws random numbers"),
    ("counted(Tensor x) -> Tensor", Calls(), "it gives another result the second time"),
    ("written(Tensor x) -> Tensor", write, "it writes to its arguments"),
    ("narrow(Tensor x) -> Tensor", narrow_only, "on small operands it raises TypeError: float32 alone"),
    ("crashes(Tensor x) -> Tensor", crash, "running it on pieces ended the process (SIGSEGV)"),
    ("normed(Tensor x) -> Tensor", lambda x: x / x.abs().max(), "it can be split along no dim"),
    ("empty_flags(Tensor x) -> (Tensor, "
     "Tensor)", lambda x: (x + 1, torch.zeros(x.shape[0], device=x.device)), "its result 1 is zero for all operands"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "compute", "why"), NOTHING, ids=[row[0].partition("(")[0] for row in NOTHING])
def test_why_nothing_is_found(schema: str, compute: Callable[..., Any], why: str) -> None:
    assert found(define(schema, compute), X) == Finding(None, why)


def test_what_is_not_run_at_all() -> None:
    aten = torch.ops.aten
    nothing = Rule("op", None)
    assert discover(nothing, aten.relu_.default, (X,), {}, [X]).why == "it writes to its arguments"
    assert discover(nothing, aten.bernoulli.default, (X,), {}, [X]).why == "it draws random numbers"
    assert discover(nothing, aten.relu.default, (T(),), {}, [T()]).why == "it has no operand with dims"
    assert discover(nothing, aten.relu.default, (T(4, 0),), {}, [T(4, 0)]).why == "a tensor is empty"


def test_a_kernel_runs_in_a_sandbox() -> None:
    """It is run many times there, and its count, what it draws and what it prints are not seen here."""
    kernel = Calls()
    op = define("isolated(Tensor x) -> Tensor", lambda x: (kernel(x), print("seen"), x + 1)[2])
    state = torch.random.get_rng_state()
    assert found(op, X).rule is not None
    assert kernel.count == 1  # on meta, by the test
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_threshold_that_no_call_reaches_is_not_seen() -> None:
    """The limit that is documented: sizes and values beside those that are tried."""
    far = define("far(Tensor x) -> Tensor", lambda x: torch.where((x == 7.25).any(), x / x.abs().max(), x))
    near = define("near(Tensor x) -> Tensor", lambda x: torch.where(x.abs().max() < 1e3, x, x / x.abs().max()))
    assert rule_found(far, X) == ("... -> ...", "")
    assert found(near, X).rule is None


def test_dims_that_are_equal_by_chance() -> None:
    """What is found where two sizes are equal is not used where they are not."""
    op = define("aligned(Tensor x, Tensor w) -> Tensor", lambda x, w: x + w if x.shape[0] == w.shape[0] else x - w[:1])
    assert rule_found(op, T(64), T(64))[0] == "..., ... -> ..."
    assert rule_found(op, T(64), T(40))[0] == "a, b! -> a"
    assert found(op, T(64), T(32)).rule is None  # over two ranks they would be equal


def test_calls_that_look_alike_when_small_share_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    op = define("shared(Tensor x) -> Tensor", lambda x: x.softmax(-1))
    first = found(op, T(521, 1031, 67))
    monkeypatch.setattr(module, "isolated", lambda _: pytest.fail("it is searched for again"))
    assert first.rule is not None and found(op, T(257, 2053, 37)).rule == first.rule


def test_a_whole_guess_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the proof decides: where it fails, nothing is found."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ProofError("no")

    monkeypatch.setattr("autopar.runtime.discovery.guesses.prove", fails)
    assert found(define("doubted(Tensor x) -> Tensor", lambda x: x * 2), X).why == "it can be split along no dim"


ORACLE = ["amin", "cat", "index_put", "convolution_backward", "max.dim", "le.Tensor", "addmm",
          "native_layer_norm_backward", "cumsum", "embedding", "nll_loss_forward", "bmm", "_cdist_forward", "index_add",
          "gather", "avg_pool2d"]  # fmt: skip


APART = ("amin", "index_put", "le.Tensor", "embedding", "cumsum", "native_layer_norm_backward")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in APART else pytest.mark.sweep("an op of each kind is in APART"))
        for name in ORACLE
    ],
)
def test_what_is_found_of_known_ops_is_true(name: str) -> None:
    """On the tables' own calls, whose sizes and values are others than those that were tried."""
    op = overload(name)
    some = 0
    for spec in TABLE[name][:9]:
        args, kwargs = made(spec, name)
        results = op(*args, **kwargs)
        types = [
            one if one is None else T(*one.shape, dtype=one.dtype)
            for one in (results if isinstance(results, tuple) else (results,))
        ]
        given = pytree.tree_map_only(torch.Tensor, lambda one: T(*one.shape, dtype=one.dtype), (args, kwargs))
        finding = discover(Rule(name, None), op, *given, types)
        if finding.rule is not None:
            prove(op, args, kwargs, finding.rule)
            some += 1
    assert some


def test_a_registered_rule_comes_first() -> None:
    op = define("preferred(Tensor x) -> Tensor", lambda x: x * 2)
    assert bind(op, (X,), {}, [X], rule_of(op)).pattern.text == "... -> ..."
    register_rule("a b! c! -> a b! c!", op)
    try:
        assert bind(op, (X,), {}, [X], rule_of(op)).pattern.text == "a b! c! -> a b! c!"
    finally:
        del RULES[op]
