"""Ops without a sharding rule are taken apart as torch does, where the parts have rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from black_boxes import Apply
from equality import check_equal
from torch.nn import functional

from autopar import Mesh
from autopar.capture import capture
from autopar.ir.nodes import is_getitem
from autopar.ir.program import Program
from autopar.rules.registry import RULES, Rule, overload

MESH = Mesh(dp=2, tp=2)


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
