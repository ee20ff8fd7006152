"""``register_rule`` and the error that leads to it: what fits an op is told at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autopar
from autopar import RuleError, register_rule
from autopar.rules.registry import RULES, find_rule, overload

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _rules_stay() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize(
    ("pattern", "op", "text"),
    [
        ("a -> b", "mm", "rule 'a -> b' has 1 operand, aten::mm has 2: self, mat2"),
        ("a -> b", aten.mm, "rule 'a -> b' has 1 operand, aten::mm has 2: self, mat2"),
        ("a, b, c -> a", aten.mm.default, "rule 'a, b, c -> a' has 3 operands, aten::mm has 2: self, mat2"),
        (
            "... -> ...",
            "clamp.Tensor",
            "rule '... -> ...' has 1 operand, aten::clamp.Tensor has 3: self, min, max; it fits aten::clamp",
        ),
        ("... -> ...", "frexp.Tensor", "rule '... -> ...' has 1 result, aten::frexp.Tensor has 2"),
        ("... -> ..., ...", "aten::erfinv", "rule '... -> ..., ...' has 2 results, aten::erfinv has 1"),
        (
            "..., ... -> ...",
            aten.mul,
            "rule '..., ... -> ...' has 2 operands, aten::mul has 0; it fits aten::mul.Tensor",
        ),
        ("... -> ...", "arange", "rule '... -> ...' has 1 operand, aten::arange has 0"),
        ("a -> a, a", "cat", "rule 'a -> a, a' has 2 results, aten::cat has 1"),
    ],
)
def test_a_pattern_of_the_wrong_size(pattern: str, op: Any, text: str) -> None:
    before = dict(RULES)
    with pytest.raises(RuleError) as caught:
        register_rule(pattern, op)
    assert str(caught.value) == text
    assert before == RULES


@pytest.mark.parametrize(
    ("pattern", "op"),
    [
        ("... -> ...", aten.i0),
        ("... -> ...", aten.i0.default),
        ("... -> ...", "aten::i0"),
        ("..., ..., ... -> ...", "clamp.Tensor"),
        ("... -> ..., ...", "frexp.Tensor"),
        ("a, b -> (a b)", "cat"),  # a list of tensors: as many operands as the program has
        ("(a b) -> a, b", "split.Tensor"),
        (lambda *args: "a -> b", "mm"),
    ],
)
def test_what_fits_is_registered(pattern: Any, op: Any) -> None:
    register_rule(pattern, op)
    assert [rule.pattern for rule in RULES.values()].count(pattern) >= 1
    found = overload(op) if isinstance(op, str) else getattr(op, "default", op)
    assert find_rule(found).pattern == pattern


@torch.library.custom_op("test_register_rule::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)


class Halving(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halved(x)


def test_an_op_as_its_maker_holds_it() -> None:
    register_rule("... -> ...", halved)
    assert find_rule(torch.ops.test_register_rule.halved.default).pattern == "... -> ..."


def raises(*_: object) -> str:
    raise KeyError("d")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises, "the function that gives the rule of test_register_rule::halved failed: KeyError: 'd'"),
        (
            lambda x: 3,
            "the function that gives the rule of test_register_rule::halved returned 3; a pattern is text, alone or "
            "in a pair",
        ),
        (lambda x: "a b", "rule 'a b': it needs exactly one '->'"),
    ],
)
def test_a_function_that_gives_no_rule(function: Any, text: str) -> None:
    register_rule(function, halved)
    with pytest.raises(RuleError) as caught:
        autopar.parallelize(Halving(), autopar.Mesh(dp=2), "ddp", example=(torch.randn(4, 2),))
    assert text in str(caught.value) and "test_register_rule.py:" in str(caught.value)


def test_a_result_of_unknown_size() -> None:
    text = (
        r"rule 'a -> b': the factor 'b' of its result is in no operand, so no rank knows its piece; write 'b!' if "
        r"it stays whole, or"
    )
    with pytest.raises(RuleError, match=text):
        register_rule("a -> b", halved)
    register_rule("a -> b!", halved)
    register_rule("-> n", "arange", sizes={0: 0})


def test_the_tables_fit_their_ops() -> None:
    lines = [(rule, op) for op, rule in RULES.items() if isinstance(rule.pattern, str)]
    assert len(lines) > 100
    for rule, op in lines:
        register_rule(rule.pattern, op, sizes=rule.sizes)


@pytest.mark.parametrize(
    ("op", "remedy"),
    [
        (torch.erfinv, "torch.ops.aten.erfinv"),
        (torch.Tensor.erfinv, "torch.ops.aten.erfinv"),
        (torch.nn.functional.gelu, "torch.ops.aten.gelu"),
        (test_the_tables_fit_their_ops, 'torch.ops.mylib.rope or "mylib::rope"'),
        (torch.nn.Linear, 'torch.ops.mylib.rope or "mylib::rope"'),
        (lambda x: x, 'torch.ops.mylib.rope or "mylib::rope"'),
        (3, 'torch.ops.mylib.rope or "mylib::rope"'),
        (None, 'torch.ops.mylib.rope or "mylib::rope"'),
    ],
)
def test_what_is_not_an_op(op: Any, remedy: str) -> None:
    with pytest.raises(TypeError) as caught:
        register_rule("... -> ...", op)
    assert str(caught.value) == f"{re.sub(' at 0x[0-9a-f]+', '', repr(op))} is not an op; give {remedy}"


@pytest.mark.parametrize("pattern", [3, None, ("...", "...")])
def test_what_is_not_a_pattern(pattern: Any) -> None:
    with pytest.raises(TypeError) as caught:
        register_rule(pattern, "erfinv")
    assert (
        str(caught.value) == f'{pattern!r} is not a pattern; write one as "... -> ...", or a function that returns one'
    )


@pytest.mark.parametrize(("op", "name"), [(aten.lerp, "default"), ("lerp", "default"), ("aten::lerp.Tensr", "Tensr")])
def test_an_overload_that_is_not_there(op: Any, name: str) -> None:
    with pytest.raises(
        RuleError, match=f"^aten::lerp has no overload '{name}'; name one of aten::lerp\\.Scalar, aten::lerp\\.Tensor, "
    ):
        register_rule("..., ..., ... -> ...", op)


@pytest.mark.parametrize("name", ["nowhere::op", "no_such_op", "aten::", "", "name", "no such::op"])
def test_an_op_that_is_not_there(name: str) -> None:
    with pytest.raises(
        RuleError, match=f"^torch has no op {re.escape(repr(name))}; write it as 'add.Tensor' or 'library::op'$"
    ):
        register_rule("... -> ...", name)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (
            aten.i0.default,
            '; if it works element by element, register one in a line:\n    autopar.register_rule("... -> ...", '
            '"aten::i0")',
        ),
        (
            aten.nextafter.default,
            '; if it works element by element, register one in a line:\n    autopar.register_rule("..., ... -> ...", '
            '"aten::nextafter")',
        ),
        (
            aten.frexp.Tensor,
            '; if it works element by element, register one in a line:\n    autopar.register_rule("... -> ..., ...", '
            '"aten::frexp.Tensor")',
        ),
        (
            aten._foreach_exp.default,
            "; register a function of its arguments that returns its pattern:\n    autopar.register_rule(pattern_of, "
            '"aten::_foreach_exp")',
        ),
        (
            aten.block_diag.default,
            "; register a function of its arguments that returns its pattern:\n    autopar.register_rule(pattern_of, "
            '"aten::block_diag")',
        ),
        (
            aten.eye.default,
            "; register a function of its arguments that returns its pattern:\n    autopar.register_rule(pattern_of, "
            '"aten::eye")',
        ),
        (len, ""),
    ],
    ids=str,
)
def test_the_line_that_is_suggested(op: Any, text: str) -> None:
    RULES.pop(op, None)
    with pytest.raises(RuleError) as caught:
        find_rule(op)
    told = str(caught.value)
    assert told.startswith("no sharding rule for ")
    assert told.endswith(text) and re.fullmatch(r"no sharding rule for [^;\n]+", told.removesuffix(text)), told


@pytest.mark.parametrize("op", [aten.i0.default, aten.nextafter.default, aten.frexp.Tensor])
def test_the_suggested_line_can_be_pasted(op: Any) -> None:
    RULES.pop(op, None)
    with pytest.raises(RuleError) as caught:
        find_rule(op)
    pattern, name = re.findall(r'"([^"]*)"', str(caught.value))
    register_rule(pattern, name)
    assert find_rule(op).pattern == pattern
