"""Plans with ``"search"``: their other entries are constraints, and all else is open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block
from torch import nn

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.plan.boundary import OPEN
from autopar.plan.constraints import constraints
from autopar.plan.plan import Constraints, of_the_batch, resolve, searches
from autopar.plan.presets import PRESETS

MESH = Mesh(dp=2, tp=2)
SHAPES = {"up.weight": (12, 8), "up_proj.weight": (12, 8)}
INPUTS = {"x": (4, 8), "y": (4,)}


def resolved(plan: Any) -> Constraints:
    return resolve(plan, MESH, SHAPES, INPUTS)


@pytest.mark.parametrize("plan", ["search", ["search"], ("search", {}), ["search", {}, {}]], ids=str)
def test_a_search_without_constraints(plan: Any) -> None:
    assert searches(plan)
    assert resolved(plan) == Constraints(search=True)


def test_other_plans_search_nothing() -> None:
    assert not any(map(searches, [None, "megatron", {}, {"search": ("tp",)}, ["megatron", {}], []]))
    assert not resolved("megatron").search


def test_what_constraints_name_has_that_layout() -> None:
    plan = ["search", "megatron", {"up.weight": ("tp",), "y": ()}]
    assert resolved(plan).attrs == {
        "up_proj.weight": DistAttr.split("tp", None),
        "up.weight": DistAttr.split("tp", None),
        "y": DistAttr.replicated(1),
    }
    assert resolved(["search", {"*": ("tp",)}, {"y": (None,)}]).attrs["y"] == DistAttr.replicated(1)  # the later one
    assert resolved([{"up.weight": ("tp",)}, "search"]).attrs.keys() == {"up.weight"}


def test_open_dims_of_parameters_and_inputs() -> None:
    attrs = resolved(["search", {"up.weight": ("?", "tp"), "x": ("dp", "?")}]).attrs
    assert attrs["up.weight"].dims == (OPEN, ((None, ("tp",)),))
    assert attrs["x"].dims == (((None, ("dp",)),), OPEN)


def test_an_input_whose_first_dim_is_open_may_be_the_batch() -> None:
    dims = {name: len(shape) for name, shape in INPUTS.items()}
    assert of_the_batch(["search", {"x": ("?", "tp"), "y": ("?",)}], MESH, dims) == {}
    assert of_the_batch(["search", {"x": ("dp", "?"), "y": (None,)}], MESH, dims) == {"x": True, "y": False}


def test_errors_are_those_of_other_plans() -> None:
    with pytest.raises(PlanError, match="the plan's glob 'dwn' matches no parameter or input"):
        resolved(["search", {"dwn": ("tp",)}])
    with pytest.raises(PlanError, match=r"the plan contradicts itself on up.weight: .* make the globs disjoint"):
        resolved(["search", {"*.up.weight": ("tp",), "up.*": (None, "tp")}])
    with pytest.raises(PlanError, match="did you mean 'search'"):
        resolved("serach")
    with pytest.raises(PlanError, match="did you mean 'search'"):
        resolved(["searched", {}])


def test_a_captured_call_has_only_the_users_constraints() -> None:
    """No batch is split, nothing is whole by default, and no note speaks of what is."""
    model, x = Block(), torch.randn(4, 6, 8)
    attrs, decisions = constraints("search", model, MESH, capture(model, (x,)))
    assert attrs == {} and decisions.search and decisions.notes == ()
    captured = capture(model, (x,))
    (act,) = captured.modules["act"]
    attrs, decisions = constraints(["search", {"up.weight": ("?", "tp"), "act()": ("dp", "?")}], model, MESH, captured)
    assert attrs.names == {"up_weight": "up.weight", act: "act()"} and attrs.keys() == attrs.names.keys()
    assert attrs["up_weight"] == DistAttr((OPEN, ((None, ("tp",)),)))
    assert not constraints("ddp", model, MESH, captured)[1].search


def test_a_preset_that_names_nothing_of_the_model() -> None:
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    attrs, decisions = constraints(["search", "megatron"], model, MESH, capture(model, (x,)))
    assert attrs == {} and len(PRESETS["megatron"].globs) > 100
    assert decisions.notes == (
        "the model has none of the names of the preset megatron, so it does not constrain the search",
    )
