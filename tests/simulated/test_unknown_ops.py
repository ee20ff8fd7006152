"""Ops without a sharding rule in a model: what is found for them, or that they are computed whole, is reported."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from black_boxes import Apply, define
from equality import check_equal
from torch import nn

import autopar
from autopar import Mesh, RuleError
from autopar.ir.program import Program
from autopar.plan import ops_without_rule
from autopar.rules.registry import RULES

MESH = Mesh(dp=2, tp=2)


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


def test_a_rule_that_was_found_is_a_warning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each op that is not torch's; one that is registered needs none."""
    monkeypatch.setattr(ops_without_rule, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (8, 16):
            autopar.parallelize(Gated(), MESH, GATED, example=(torch.randn(rows, 16),), cache=False)
    first, second = (str(warning.message) for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    assert re.fullmatch(
        r"the sharding rule of unknown_ops::gate was found by running it on some values, and an op that treats other "
        r"values otherwise would be wrong on a mesh: if the rule is right, register it before parallelize\n"
        r'    autopar\.register_rule\("\.\.\., \.\.\., \.\.\. -> \.\.\., \.\.\.", "unknown_ops::gate"\)\n'
        r"    test_unknown_ops\.py:\d+  gated, weight = gate\(y, .*   in module the root",
        first,
    )
    assert second.startswith("the sharding rule of unknown_ops::gate_backward was found")


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
    parallel = autopar.parallelize(Apply(lambda x: kernel(x * 2)), MESH, "megatron", example=(torch.randn(8, 16),))
    (note,) = parallel.reports["place"].notes
    assert (
        "unknown_ops::kernel has no sharding rule, and none was found: on small operands it raises "
        "NotImplementedError: " in note
    )
