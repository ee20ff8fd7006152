"""Ops without a sharding rule: taken apart as torch does, run on pieces to find a rule, or computed whole and
reported."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import check_equal
from rule_calls import TABLE, made
from torch import nn
from torch.nn import functional

import autopar
from autopar import Mesh, RuleError, register_rule
from autopar.capture import capture
from autopar.errors import ProofError
from autopar.ir.nodes import is_getitem
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.rules.binding import bind
from autopar.rules.registry import RULES, Rule, overload, rule_of
from autopar.runtime.discovery import discover as module
from autopar.runtime.discovery import sandbox
from autopar.runtime.discovery.discover import Finding, discover
from autopar.runtime.discovery.factors import Factor, pattern_of
from autopar.runtime.discovery.proof import prove
from autopar.runtime.discovery.sandbox import CrashError, SandboxError, isolated
from autopar.runtime.discovery.scaled import Scale, scales
from autopar.torch_private import OpOverload, pytree

LIBRARY = torch.library.Library("unknown_ops", "DEF")
MESH = Mesh(dp=2, tp=2)


def define(schema: str, compute: Callable[..., Any]) -> OpOverload:
    """A black box: one kernel for all devices."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    return getattr(torch.ops.unknown_ops, name).default


def T(*shape: int, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType(shape, dtype)


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


# -- what is found -------------------------------------------------------------------------------------------------


def crossed(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    turned = torch.cat([-x[..., 1::2], x[..., ::2]], -1)
    return x * p[..., None].cos() + turned * p[..., None].sin()


def contiguous_only(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).exp().view(x.shape)


def below(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * (torch.arange(x.shape[1], device=x.device) < k)[:, None]


X = T(64, 128, 512)
INDEX = torch.int64
OPS: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], str, str]] = [
    # schema, kernel, arguments, keywords, the pattern that is found, what is linear
    ("swish(Tensor x) -> Tensor", lambda x: x * x.sigmoid(), (X,), {}, "... -> ...", ""),
    ("twice(Tensor x) -> Tensor", lambda x: x * 2, (X,), {}, "... -> ...", "0"),
    ("steps(Tensor x) -> Tensor", torch.ceil, (X,), {}, "... -> ...", ""),
    ("rows(Tensor x) -> Tensor", lambda x: x.softmax(-1), (X,), {}, "... c! -> ... c!", ""),
    ("rows_scaled(Tensor x, Tensor w) -> "
     "Tensor", lambda x, w: x.softmax(-1) * w, (X, T(512)), {}, "a b c!, c! -> a b c!", "1"),
    ("product(Tensor x, Tensor w) -> "
     "Tensor", lambda x, w: x @ w, (T(64, 512), T(512, 256)), {}, "a b, b c -> a c", "0, 1"),
    ("square(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w, (T(64, 64), T(64, 64)), {}, "a b, b c -> a c", "0, 1"),
    ("biased(Tensor x, Tensor w, Tensor? b=None) -> "
     "Tensor", functional.linear, (X, T(256, 512)), {}, "a b c, d c, () -> a b d", "0, 1"),
    ("total(Tensor x) -> Tensor", lambda x: x.sum(), (X,), {}, "... -> ()", "0"),
    ("highest(Tensor x) -> Tensor", lambda x: x.amax(1), (X,), {}, "... b c -> ... c by max", ""),
    ("lowest(Tensor x) -> Tensor", lambda x: x.amin(1), (X,), {}, "... b c -> ... c by min", ""),
    ("two(Tensor x) -> (Tensor, Tensor)", lambda x: (x.exp(), x.sum(-1)), (X,), {}, "... c -> ... c, ...", ""),
    ("listed(Tensor[] xs, *, Tensor w) -> "
     "Tensor", lambda xs, w: sum(xs) * w, ([X, X],), {"w": T(512)}, "a b c, a b c, c -> a b c", "2"),
    ("dense(Tensor x) -> Tensor", contiguous_only, (X,), {}, "... -> ...", ""),
    ("turned(Tensor x) -> Tensor", lambda x: x.transpose(0, 1).clone(), (X,), {}, "a b c -> b a c", "0"),
    ("rope(Tensor x, Tensor p) -> Tensor", crossed, (X, T(64, 128, dtype=INDEX)), {}, "... c!, ... -> ... c!", "0"),
    ("split_heads(Tensor x, int heads) -> "
     "Tensor", lambda x, heads: x.unflatten(-1, (heads, -1)).clone(), (X, 32), {}, "... c! -> ... d! e!", "0"),
    ("below(Tensor x, int k) -> Tensor", below, (X, 64), {}, "... b! c -> ... b! c", "0"),
    ("looked_up(Tensor w, Tensor i) -> "
     "Tensor", lambda w, i: w[i], (T(1000, 64), T(4, 128, dtype=INDEX)), {}, "a! b, c d -> c d b", "0"),
    ("furthest(Tensor x, Tensor p) -> "
     "Tensor", lambda x, p: x * p[..., None] / p.max(), (X, T(64, 128, dtype=INDEX)), {},
     "a! b! c, a! b! -> a! b! c", "0"),
    ("if_any(Tensor x, Tensor m) -> "
     "Tensor", lambda x, m: torch.where(m.any(), x, -x), (T(64, 32), T(64, 32, dtype=torch.bool)), {},
     "a b, c! d! -> a b", "0"),
    ("causal(Tensor q, Tensor k, Tensor v) -> "
     "Tensor", lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
     (T(8, 4, 32, 16),) * 3, {}, "... c! d!, ... c! d!, ... c! e -> ... c! e", "2"),
    ("gradients(Tensor g, Tensor x, Tensor w) -> (Tensor, "
     "Tensor)", lambda g, x, w: (g @ w, g.T @ x), (T(32, 64), T(32, 128), T(64, 128)), {},
     "a b, a c!, b c! -> a c!, b c!", "0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "compute", "args", "kwargs", "pattern", "linear"), OPS, ids=[row[0].partition("(")[0] for row in OPS]
)
def test_what_is_found(
    schema: str, compute: Callable[..., Any], args: Any, kwargs: Any, pattern: str, linear: str
) -> None:
    op = define(schema, compute)
    assert rule_found(op, *args, **kwargs) == (pattern, linear)


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
    """The limit that is documented: sizes and values beyond those that are tried."""
    far = define("far(Tensor x) -> Tensor", lambda x: torch.where(x.abs().max() < 1e9, x, x / x.abs().max()))
    near = define("near(Tensor x) -> Tensor", lambda x: torch.where(x.abs().max() < 1e3, x, x / x.abs().max()))
    assert rule_found(far, X) == ("... -> ...", "0")
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


# -- small calls ---------------------------------------------------------------------------------------------------


def test_small_calls() -> None:
    ways = scales((T(4096, 512, 1), [T(512)], 512, True, 2), {"dim": 3})
    assert ways[0]((T(4096, 512, 1), [T(512)], 512, True, 2), {"dim": 3}) == (
        (T(12, 14, 1), [T(14)], 512, True, 2),
        {"dim": 3},
    )
    assert ways[1]((T(4096, 512), 512), {}) == ((T(12, 14), 14), {})
    related = scales((T(8, 16), T(128), T(9)), {}, related=True)[0]
    assert (related.sizes[8] * related.sizes[16], related.sizes[8] + 1) == (related.sizes[128], related.sizes[9])
    assert scales((T(8, 16),), {})[-1] == Scale({8: 8, 16: 16}, {})
    # an index may be beyond a small piece
    assert all(way.sizes[8] != 8 for way in scales((T(8, 16), T(8, dtype=INDEX)), {}))


def test_results_must_be_as_small() -> None:
    scale = Scale({64: 12, 32: 14}, {})
    assert scale.fits([T(64, 1, 5)], [torch.empty(12, 1, 7)])
    for shape in ((12, 1, 14), (12, 2, 7), (14, 1, 7), (12, 1)):
        assert not scale.fits([T(64, 1, 5)], [torch.empty(shape)])
    assert not scale.fits([T(64), None], [torch.empty(12), torch.empty(12)])


def test_patterns() -> None:
    rows = [Factor(((0, 0), (1, 0)), ((0, 0),)), Factor(((0, 2),))]
    assert pattern_of(rows, [(4, 1, 6), (4, 5), None], [(4, 5)]) == "... 1 b, ... c!, () -> ... c!"
    assert pattern_of([], [(4, 4)], [(4, 4), ()]) == "a! b! -> a! b!, ()"
    assert pattern_of(rows[1:], [(4, 1, 6)], [()], "max") == "a! 1 b -> () by max"


def test_a_sandbox() -> None:
    assert isolated(lambda: {"a": os.getpid()})["a"] != os.getpid()
    assert len(isolated(lambda: "x" * 1_000_000)) == 1_000_000
    with pytest.raises(CrashError, match=r"^running it on pieces ended the process \(SIGSEGV\)$"):
        isolated(lambda: ctypes.string_at(0))
    with pytest.raises(CrashError, match=r"^running it on pieces ended the process$"):
        isolated(lambda: os._exit(1))


def children() -> list[str]:
    """The processes of this one: other tests keep some for later."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_sandbox_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    before = children()
    with pytest.raises(SandboxError, match=r"did not end in 0\.2 seconds"):
        isolated(lambda: __import__("time").sleep(60))
    assert children() == before, "nothing is left behind"


# -- what torch takes apart -----------------------------------------------------------------------------------------


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        return self.function(x, *others)


def ops_of(program: Program) -> set[str]:
    return {str(node.target.name()) for node in program.nodes if node.op == "call_function" and not is_getitem(node)}


APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # op → what calls it
    "celu": functional.celu,
    "addr": lambda x: torch.addr(x, x[:, 0], x[0]),
    "logaddexp2": lambda x: torch.logaddexp2(x, 2 * x),
    "nansum": lambda x: torch.nansum(x, 1),
    "special_entr": lambda x: torch.special.entr(x.abs()),
    "hardswish": lambda x: functional.hardswish(x * 2, inplace=True),
}


@pytest.mark.parametrize(("op", "function"), APART.items(), ids=APART)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_torch_can_take_apart_has_rules(
    op: str, function: Callable[..., Any], mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(RULES, overload(op), raising=False)
    with mode():
        x = torch.linspace(-1.5, 2, 24, dtype=torch.float64).reshape(4, 6).requires_grad_(mode is torch.enable_grad)
        program = capture(Apply(function), (x,)).program
        assert all(overload(op) in RULES for op in ops_of(program)), ops_of(program)


def test_what_torch_takes_apart_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rule(monkeypatch, "logaddexp2", "celu")
    x = torch.linspace(-1.5, 2, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
    parallel = check_equal(
        Apply(lambda x: (functional.celu(x), torch.logaddexp2(x, x * x))), MESH, {"*.x": ("dp", None)}, (x,)
    )
    assert not parallel.reports["place"].notes


def without_rule(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.delitem(RULES, overload(name), raising=False)


def test_an_op_whose_parts_have_no_rule_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rule(monkeypatch, "logaddexp2")
    x = torch.randn(4, 6)
    assert "aten::logaddexp2" not in ops_of(capture(Apply(lambda x: torch.logaddexp2(x, 2 * x)), (x,)).program)
    without_rule(monkeypatch, "log1p")
    x = torch.randn(5, 6)
    assert "aten::logaddexp2" in ops_of(capture(Apply(lambda x: torch.logaddexp2(x, 2 * x)), (x,)).program)
    monkeypatch.setitem(RULES, overload("log1p"), Rule("log1p", "... -> ..."))  # known to be what lacked
    assert "aten::logaddexp2" not in ops_of(capture(Apply(lambda x: torch.logaddexp2(x, 2 * x)), (x,)).program)


def test_an_op_with_a_rule_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    op = overload("logaddexp2")
    monkeypatch.setitem(RULES, op, Rule("logaddexp2", "..., ... -> ..."))
    assert "aten::logaddexp2" in ops_of(
        capture(Apply(lambda x: torch.logaddexp2(x, 2 * x)), (torch.randn(4, 6),)).program
    )


# -- from model to report ------------------------------------------------------------------------------------------


@torch.library.custom_op("unknown_ops::gate", mutates_args=())
def gate(
    x: torch.Tensor, by: Sequence[torch.Tensor], power: int, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.sigmoid(by[0] * by[1])
    return scale * x**power * weight, weight


@gate.register_fake
def _(
    x: torch.Tensor, by: Sequence[torch.Tensor], power: int, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("unknown_ops::gate_backward", mutates_args=())
def gate_backward(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, power: int, scale: float) -> torch.Tensor:
    return g * scale * power * x ** (power - 1) * weight


@gate_backward.register_fake
def _(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, power: int, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.power, ctx.scale = inputs[2], keyword_only_inputs["scale"]
    ctx.mark_non_differentiable(output[1])


gate.register_autograd(
    lambda ctx, g, _: (gate_backward(g.contiguous(), *ctx.saved_tensors, ctx.power, ctx.scale), [None, None], None),
    setup_context=keep,
)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        gated, weight = gate(y, [y.detach(), y.detach()], 3, scale=0.5)
        return self.down(gated + weight)


GATED = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}


def test_a_custom_op_with_autograd_stays_split() -> None:
    model = Gated().double()
    x = torch.randn(8, 16, dtype=torch.float64)
    parallel = check_equal(model, MESH, GATED, (x,))
    assert {row.transfer for row in parallel.transfers} == {"all_reduce"}
    assert "gate : (f64[8/dp 32/tp], f64[8/dp 32/tp])" in parallel.program.text()
    first, second = parallel.reports["place"].notes
    assert re.fullmatch(
        r"unknown_ops::gate has no sharding rule: one was found by running it on pieces \(1 times\); register it to "
        r"be certain, and to "
        r'silence this note\n    autopar\.register_rule\("\.\.\., \.\.\., \.\.\. -> \.\.\., \.\.\.", '
        r'"unknown_ops::gate"\)\n'
        r"    test_unknown_ops\.py:\d+  gated, weight = gate\(y, .*   in module the root",
        first,
    )
    assert "unknown_ops::gate_backward" in second
    assert first in str(parallel.reports)


def test_a_program_with_such_ops_parses_back() -> None:
    parallel = autopar.parallelize(Gated(), MESH, GATED, example=(torch.randn(8, 16),))
    again = Program.parse(parallel.program.text())
    autopar.verify.levels.verify(again, "parse")
    assert again.text() == parallel.program.text()


def test_one_line_registers_what_was_found() -> None:
    before = dict(RULES)
    model, x = Gated(), torch.randn(8, 16)
    try:
        for note in autopar.parallelize(model, MESH, GATED, example=(x,)).reports["place"].notes:
            exec(note.splitlines()[1].strip())
        parallel = autopar.parallelize(model, MESH, GATED, example=(x,), strict=True)
        assert not parallel.reports["place"].notes
    finally:
        RULES.clear()
        RULES.update(before)


def test_strict_takes_registered_rules_alone() -> None:
    with pytest.raises(RuleError) as caught:
        autopar.parallelize(Gated(), MESH, GATED, example=(torch.randn(8, 16),), strict=True)
    assert re.fullmatch(
        r"gate: no sharding rule for unknown_ops::gate; register a function of its arguments that returns its "
        r"pattern:\n"
        r'    autopar\.register_rule\(pattern_of, "unknown_ops::gate"\)\n'
        r"    test_unknown_ops\.py:\d+  gated, weight = gate\(y, .*   in module the root",
        str(caught.value),
    )


def test_what_is_computed_whole_is_reported_with_its_cost() -> None:
    op = define("whitened(Tensor x) -> Tensor", lambda x: x / x.abs().max())
    x = torch.randn(8, 16, dtype=torch.float64)
    parallel = check_equal(Apply(lambda x, w: op((x * w).detach()) + op((x - w).detach()) + x * w), MESH,
                           {"*.x": ("dp", "tp")},
                           (x, torch.randn(16, dtype=torch.float64).requires_grad_()))  # fmt: skip
    (note,) = parallel.reports["place"].notes
    assert re.fullmatch(
        r"unknown_ops::whitened has no sharding rule, and none was found: it can be split along no dim; each rank "
        r"computes all of it, on "
        r"whole operands \(2 times, 1,536 bytes gathered, 2,048 bytes of results\); register_rule one, or refuse it "
        r"with strict=True\n"
        r"    test_unknown_ops\.py:\d+  .*   in module the root",
        note,
    )


def test_a_black_box_without_a_kernel_for_the_cpu() -> None:
    """As of Triton: what it does is known where the model runs, and the report says why nothing is found."""

    @torch.library.custom_op("unknown_ops::kernel", mutates_args=(), device_types="cuda")
    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    kernel.register_fake(torch.empty_like)
    parallel = autopar.parallelize(Apply(lambda x: kernel(x * 2)), MESH, example=(torch.randn(8, 16),))
    (note,) = parallel.reports["place"].notes
    assert (
        "unknown_ops::kernel has no sharding rule, and none was found: on small operands it raises "
        "NotImplementedError: " in note
    )


def test_a_registered_rule_comes_first() -> None:
    op = define("preferred(Tensor x) -> Tensor", lambda x: x * 2)
    assert bind(op, (X,), {}, [X], rule_of(op)).pattern.text == "... -> ..."
    register_rule("a b! c! -> a b! c!", op)
    try:
        assert bind(op, (X,), {}, [X], rule_of(op)).pattern.text == "a b! c! -> a b! c!"
    finally:
        del RULES[op]
