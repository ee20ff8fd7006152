"""A model that parallelize refuses, with an exact text, and leaves untouched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from presets import preset_of
from torch import nn

import autopar
from autopar import Mesh

x = torch.randn(4, 8)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: (id(value), value.clone(), value.grad) for name, value in model.state_dict(keep_vars=True).items()}


def refuses(error: type[Exception], text: str, model: nn.Module, mesh: Any = None, plan: Any = None,
            example: Any = (x,), **options: Any) -> None:  # fmt: skip
    """``parallelize`` raises ``error`` with exactly ``text`` (a regular expression), and the model is untouched.

    Without a plan it is the preset for the mesh.
    """
    mesh = Mesh(dp=2, tp=2) if mesh is None else mesh
    plan = preset_of(getattr(mesh, "names", ())) if plan is None else plan
    before = snapshot(model)
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    with pytest.raises(error) as caught:
        autopar.parallelize(model, mesh, plan, example=example, **options)
    assert re.fullmatch(text, str(caught.value)), str(caught.value)
    after = snapshot(model)
    assert before.keys() == after.keys()
    for name, (identity, value, grad) in before.items():
        assert identity == after[name][0] and torch.equal(value, after[name][1]) and grad is after[name][2]
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x))
