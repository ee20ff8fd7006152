"""Passes are linear in the graph: four times the layers are four times the operands that a pass looks at."""

from __future__ import annotations

import importlib

import pytest
import torch
from models import COLUMN_ROW, Residual

from autopar import Mesh
from autopar.capture import capture
from autopar.ir import nodes
from autopar.passes import pipeline, run_passes
from autopar.plan.constraints import constraints

MESH = Mesh(dp=2, tp=2)
PLANS = {"split": dict(COLUMN_ROW), "whole": {"x": (None,)}, "zero": {"*.weight": ("dp",), "*.bias": ("dp",)}}


def looked_at(layers: int, plan: dict[str, tuple[str | None, ...]], monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Pass → operands listed while it runs, verification included."""
    model = Residual(layers=layers)
    captured = capture(model, (torch.randn(4, 6, 8),))
    attrs, _ = constraints(plan, model, MESH, captured)
    count = 0

    def counting(node):
        nonlocal count
        found = original(node)
        count += 1 + len(found)
        return found

    original = nodes.operands
    found = {}
    with monkeypatch.context() as patch:
        for name in ("expand", "place", "follow", "narrow", "lift", "defer", "reshard", "share"):
            patch.setattr(importlib.import_module(f"autopar.passes.{name}"), "operands", counting, raising=False)
        for name in ("levels", "pieces"):
            patch.setattr(importlib.import_module(f"autopar.verify.{name}"), "operands", counting)
        for step in pipeline(MESH, attrs):
            count = 0
            run_passes(captured.program, [step])
            found[step.name] = count
    return found


@pytest.mark.simulated
@pytest.mark.parametrize("name", PLANS)
def test_operands_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (looked_at(layers, PLANS[name], monkeypatch) for layers in (2, 8))
    for step, count in few.items():
        assert 0 < many[step] <= 4.4 * count, step
