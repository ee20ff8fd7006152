"""Rules are proven by running their ops on pieces, on the calls of ``rule_calls``; wrong rules are caught.

``test_op_samples`` proves them on the calls that torch's own samples make, and knows which rule is shown where.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from operands import Call, F, I, Operand, P, call, made
from rule_calls import TABLE
from rule_calls_convolution import CONVOLUTIONS, convolution, convolution_backward
from rule_calls_loss import SUM
from rule_calls_normalization import NORMS, layer_norm_backward

from autopar.errors import ProofError
from autopar.rules import Rule
from autopar.rules.registry import find_rule, overload
from autopar.runtime.discovery.proof import Proof, difference, prove
from autopar.torch_private import pytree


@functools.cache
def proven(name: str) -> list[Proof]:
    return [prove(overload(name), *made(spec, name)) for spec in TABLE[name]]


@pytest.mark.simulated
@pytest.mark.parametrize("name", TABLE)
def test_rule_holds_and_needs_its_whole_factors(name: str) -> None:
    proofs = proven(name)
    needed = frozenset[str]().union(*(proof.needed for proof in proofs))
    idle = frozenset[str]().union(*(proof.idle for proof in proofs))
    assert idle <= needed, f"{name}: no call goes wrong when {', '.join(sorted(idle - needed))} is split"
    made_of_operands = [
        spec
        for spec in TABLE[name]
        if any(isinstance(o, Operand) and max(o.shape, default=0) > 1 for o in pytree.tree_leaves(spec))
    ]
    assert not made_of_operands or any(proof.claims for proof in proofs), f"{name}: nothing was shown"


# -- wrong rules are caught ----------------------------------------------------------------------------------------

WRONG: list[tuple[str, Rule, Call, str]] = [  # what the message must say
    ("a softmax that comes apart", Rule("_softmax", "a b -> a b"), call(F(4, 5), 1, False), "b splits"),
    ("a softmax of the wrong dim", Rule("_softmax", "a! b -> a! b"), call(F(4, 5), 1, False), "b splits"),
    ("an additive relu", Rule("relu", "... -> ...", "0"), call(F(4, 5)), "a sum over 2 ranks passes through 0"),
    ("an additive ceiling", Rule("ceil", "... -> ...", "0"), call(F(4, 5)), "a sum over 2 ranks passes through 0"),
    ("an additive gelu", Rule("gelu", "... -> ...", "0"), call(F(4, 5)), "a sum over 2 ranks passes through 0"),
    (
        "an addition that takes one sum",
        Rule("add.Tensor", "..., ... -> ...", "0"),
        call(F(4, 5), F(5)),
        "passes through 0",
    ),
    (
        "a jointly additive product",
        Rule("mul.Tensor", "..., ... -> ...", "0+1"),
        call(F(4, 5), F(5)),
        "passes through 0+1",
    ),
    ("a quotient of sums", Rule("div.Tensor", "..., ... -> ...", "0, 1"), call(F(4, 5), P(5)), "passes through 1"),
    ("a narrowing cast", Rule("_to_copy", "... -> ...", "0"), call(F(4, 5), dtype=torch.float32), "passes through 0"),
    ("a product with its result turned", Rule("mm", "m k, k n -> n m"), call(F(4, 5), F(5, 4)), "splits over"),
    ("a product that forgets its sum", Rule("mm", "m k, l n -> m n"), call(F(4, 5), F(5, 6)), "k splits"),
    ("a maximum that is summed", Rule("amax", "a b -> a"), call(F(4, 5), [1]), "b splits"),
    ("a maximum that is a minimum", Rule("amax", "a b -> a by min"), call(F(4, 6), [1]), "b splits"),
    ("a mean of means", Rule("mean.dim", "a b -> a"), call(F(4, 5), [1]), "b splits"),
    ("a bias counted twice", Rule("addmm", "n, m k, k n -> m n"), call(F(6), F(4, 5), F(5, 6)), "k splits"),
    (
        "a convolution's bias counted twice",
        Rule("convolution", "n i s!, o i k!, o -> n o t!"),
        convolution(*CONVOLUTIONS[0]),
        "i splits",
    ),
    (
        "a bias's gradient that is whole",
        Rule("convolution_backward", "n o t!, n i s!, o i k! -> n i s!, o i k!, o"),
        convolution_backward(*CONVOLUTIONS[0], mask=(True, True, True)),
        "i splits",
    ),
    (
        "a bias that is split with the rows",
        Rule("addmm", "m, m k, k n -> m n"),
        call(F(4), F(4, 5), F(5, 4)),
        "m splits",
    ),
    ("a view without its sizes", Rule("view", "a b -> (a b)", "0"), call(F(4, 6), [24]), "a splits"),
    (
        "a view that keeps the minor half",
        Rule("view", lambda *_: ("(a b) -> b a", {"a": 4, "b": 4}), "0", {1: "*"}),
        call(F(16), [4, 4]),
        "splits",
    ),
    ("factories without their sizes", Rule("full", "-> a b"), call([4, 5], 2.0), "a splits"),
    (
        "a vocabulary that is split",
        Rule("embedding", "v d, ... -> ... d", "0"),
        call(F(6, 5), I(4, below=6)),
        "v splits",
    ),
    (
        "a loss over split classes",
        Rule("nll_loss_forward", "b c, b, c -> (), ()"),
        call(F(5, 6), I(5, below=6), None, SUM, -100),
        "c splits",
    ),
    (
        "a loss that is a mean",
        Rule("nll_loss_forward", "b c!, b, c! -> (), ()"),
        call(F(5, 6), I(5, below=6), None, 1, -100),
        "b splits",
    ),
    ("running sums that come apart", Rule("cumsum", "a b -> a b"), call(F(4, 5), 1), "b splits"),
    (
        "halves that are one dim",
        Rule("glu", lambda *_: ("a (b half!) -> a b", {"half": 2})),
        call(F(4, 6), 1),
        "b splits",
    ),
    (
        "a layer norm that comes apart",
        Rule("native_layer_norm_backward", "b k, b k, b 1, b 1, k, k -> b k, k, k"),
        layer_norm_backward(*NORMS[0]),
        "k splits",
    ),
    (
        "parts of a dim that come apart",
        Rule("cat", lambda *_: ("a b, a b -> a (b n)", {"n": 2})),
        call([F(4, 5), F(4, 5)], 1),
        "b splits",
    ),
    (
        "rows chosen from a split table",
        Rule("index_select", "v d, i -> i d", "0"),
        call(F(6, 5), 0, I(4, below=6)),
        "v splits",
    ),
]


@pytest.mark.parametrize(("what", "wrong", "spec", "claim"), WRONG, ids=[row[0].replace(" ", "-") for row in WRONG])
def test_wrong_rule_is_caught(what: str, wrong: Rule, spec: Call, claim: str) -> None:
    with pytest.raises(ProofError) as caught:
        prove(overload(wrong.op), *made(spec, wrong.op), rule=wrong)
    first, second, *_ = str(caught.value).splitlines()
    assert wrong.op in first
    assert claim in second


def without_whole(rule: Rule) -> Rule:
    """The rule with every ``!`` taken off."""

    def pattern(*args: Any, **kwargs: Any) -> Any:
        said = rule.pattern(*args, **kwargs) if callable(rule.pattern) else rule.pattern
        return (said[0].replace("!", ""), said[1]) if isinstance(said, tuple) else said.replace("!", "")

    return replace(rule, pattern=pattern)


# split along what only the result has, these would write past its end instead of raising
UNBOUNDED = {"embedding_dense_backward"}


@pytest.mark.simulated
@pytest.mark.parametrize("name", [name for name in TABLE if name not in UNBOUNDED])
def test_no_whole_factor_is_idle(name: str) -> None:
    """Without any ``!`` some call fails, wherever an operand has a factor that must stay whole."""
    if any(proof.needed for proof in proven(name)):
        with pytest.raises(ProofError):
            for spec in TABLE[name]:
                prove(overload(name), *made(spec, name), rule=without_whole(find_rule(overload(name))))


def test_message_quotes_op_rule_claim_and_difference() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    with pytest.raises(ProofError) as caught:
        prove(overload("relu"), (x - 3,), rule=Rule("relu", "... -> ...", "0"))
    assert str(caught.value).splitlines()[:2] == [
        "the rule of relu, '... -> ...', does not hold on [2, 2]",
        "  claim: a sum over 2 ranks passes through 0",
    ]
    assert str(caught.value).splitlines()[2].startswith("  result 0 differs by ")


def test_exception_on_pieces_is_the_difference() -> None:
    with pytest.raises(ProofError, match=r"raises RuntimeError: .*\[24\]"):
        prove(overload("view"), *made(call(F(4, 6), [24]), "view"), rule=Rule("view", "a b -> (a b)"))


def test_whole_factor_that_is_not_needed_is_idle() -> None:
    rule = Rule("relu", "a b! -> a b!")
    proof = prove(overload("relu"), *made(call(F(4, 5)), "relu"), rule=rule)
    assert (proof.needed, proof.idle) == (frozenset(), frozenset({"b"}))
    assert proof.claims == tuple(f"a splits over {n} ranks{how}" for n in (2, 3) for how in ("", ", in strided pieces"))


def test_maximum_takes_no_empty_pieces() -> None:
    proof = prove(overload("amax"), *made(call(F(4, 5), [0]), "amax"))
    assert [claim for claim in proof.claims if claim.startswith("d0")] == [
        "d0 splits over 2 ranks", "d0 splits over 2 ranks, in strided pieces",
    ]  # fmt: skip  # 4 over 3 leaves the last piece empty


def test_difference() -> None:
    a = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.float64)
    assert difference(a, a.clone()) == 0
    assert difference(a, torch.tensor([2.0, float("nan"), float("inf")], dtype=torch.float64)) == 0.5
    assert difference(a, torch.tensor([1.0, 1.0, float("inf")], dtype=torch.float64)) == float("inf")
    assert difference(torch.tensor([3]), torch.tensor([1])) == 2
