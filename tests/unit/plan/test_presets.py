"""Presets, plans on top of them, what is done without a plan, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import check_equal
from models import Block
from torch import nn

import autopar
from autopar import Mesh, PlanError
from autopar.capture import capture
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import operands, record_of
from autopar.passes import Place, run_passes
from autopar.plan.constraints import constraints
from autopar.plan.plan import resolve
from autopar.plan.presets import PRESETS
from autopar.plan.spec import Spec

MESH = Mesh(dp=2, tp=2)
X = torch.randn(4, 6, 8, dtype=torch.float64)


class Attention(nn.Module):
    """A block with the names of a Llama's."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (proj(h).unflatten(-1, (2, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return x + self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def notes(model: nn.Module, plan: Any = None, mesh: Mesh = MESH, x: torch.Tensor = X) -> tuple[str, ...]:
    return check_equal(model.double(), mesh, plan, (x,)).reports["capture"].notes


BATCH = "dp splits dim 0 of the inputs x (the batch, 4); name inputs in the plan to change it"


@pytest.mark.simulated
def test_without_a_plan_tp_gets_megatron_and_says_so() -> None:
    model = Attention().double()
    parallel = check_equal(model, MESH, None, (X.clone().requires_grad_(),))
    unmatched = parallel.reports["capture"].unmatched
    matched = (f'the preset megatron splits 4 parameters over tp: q_proj 1, k_proj 1, v_proj 1, o_proj 1; '
               f'{len(unmatched)} other names of it '
               f'match nothing (reports["capture"].unmatched)')  # fmt: skip
    assert (
        len(unmatched) > 100
        and {"gate_proj", "attn.c_attn:Conv1D", "lm_head"} < set(unmatched)
        and "q_proj" not in unmatched
    )
    assert parallel.reports["capture"].notes == (f"without a plan, {matched}; give a plan to change it", BATCH)
    asked = autopar.parallelize(model, MESH, "megatron", example=(X.clone().requires_grad_(),))
    assert str(asked.program) == str(parallel.program)
    assert asked.reports["capture"].notes == (matched, BATCH)
    transfers = [(row.transfer, row.phase, row.times) for row in parallel.transfers if row.axis == "tp"]
    assert transfers == [("pend", "forward", 1), ("all_reduce", "forward", 1), ("all_reduce", "backward", 1)]


@pytest.mark.simulated
def test_a_model_without_the_presets_names() -> None:
    assert notes(Block()) == (
        "without a plan, the preset megatron is for this mesh, but the model has none of its names: every rank of tp "
        "does the same work; give a plan",
        BATCH,
    )  # fmt: skip
    unused = (
        "the axis tp splits nothing: its 2 ranks do the same work; a plan that names it, or a preset with the "
        "names of the model's layers, uses it"
    )
    assert notes(Block(), {}) == (BATCH, unused)
    assert notes(Block(), "ddp") == (BATCH, unused)
    assert notes(Block(), {"up.weight": ("tp",)}) == (BATCH,)
    assert notes(Block(), mesh=Mesh(dp=2)) == (BATCH,)


@pytest.mark.simulated
def test_axes_that_split_nothing_are_named() -> None:
    """Whoever uses one in a plan is told nothing; nor is an axis of one rank worth a line."""
    unused = (
        "the axis foo splits nothing: its 2 ranks do the same work; a plan that names it for an input or a "
        'parameter uses it, as in {"*.weight": ("foo", None)}'
    )
    assert notes(Block(), mesh=Mesh(dp=2, foo=2)) == (BATCH, unused)
    assert notes(Block(), mesh=Mesh(dp=2, foo=1)) == (BATCH,)
    assert notes(Block(), {"up.weight": ("foo", None)}, mesh=Mesh(dp=2, foo=2)) == (BATCH,)
    assert notes(Block(), {"act()": ("?", "?", "foo")}, mesh=Mesh(dp=2, foo=2)) == (BATCH,)
    flat = notes(Block(), mesh=Mesh(dp=2, cp=2), x=X[:, 0])
    assert flat[1:] == ()  # a matrix has a dim 1, which cp splits


@pytest.mark.long
def test_what_a_preset_leaves_whole() -> None:
    class Odd(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.table)

    assert notes(Odd())[2:] == (
        "whole on every rank of tp: 1 parameter of two dims or more: table 1; name them in a plan to split them",
    )
    assert notes(Odd(), ["megatron", {"table": (None, "tp")}])[2:] == ()


@pytest.mark.simulated
def test_a_plan_on_top_of_a_preset_has_the_last_word() -> None:
    plan = ["megatron", {"*.o_proj.weight": (None, None), "o_proj()": ("?", "tp", None)}]
    parallel = check_equal(Attention().double(), MESH, plan, (X,))
    text = str(parallel.program)
    assert "o_proj_weight : f64[8 8] = param" in text and "q_proj_weight : f64[8/tp 8] = param" in text


def test_a_preset_that_does_not_fit_is_passed_over_and_told() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj_weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.in_proj_weight

    assert notes(Odd()) == (
        "without a plan, the preset megatron is for this mesh, but the model has none of its names: every rank of tp "
        "does the same work; give a plan",
        "of the preset megatron, '*.in_proj_weight' does not fit in_proj_weight, which stays as it is: the plan's "
        "'*.in_proj_weight': ('(3 -1/tp)', None): the parts do not make up a dim of 8, as in_proj_weight has it",
        BATCH,
    )


def test_presets_are_data() -> None:
    assert list(PRESETS) == ["ddp", "fsdp", "hsdp", "megatron", "megatron+sp", "fsdp+tp"]
    for preset in PRESETS.values():
        assert all(isinstance(glob, str) and isinstance(spec, tuple) for glob, spec in preset.globs.items())
        resolve(preset.globs, MESH, {}, None)  # all of it can be read


@pytest.mark.parametrize(
    ("plan", "mesh", "text"),
    [
        (
            "megatorn",
            MESH,
            "no preset 'megatorn'; presets are ddp, fsdp, hsdp, megatron, megatron+sp, fsdp+tp, \"search\" finds the "
            "cheapest plan, and a plan of your own is a dict from globs; did you mean 'megatron'?",
        ),
        (
            ["ddp", "mine"],
            MESH,
            "no preset 'mine'; presets are ddp, fsdp, hsdp, megatron, megatron+sp, fsdp+tp, \"search\" finds the "
            "cheapest plan, and a plan of your own is a dict from globs",
        ),
        (
            "megatron",
            Mesh(dp=2),
            "the preset 'megatron' splits over an axis named tp, and the mesh (dp=2) has none; name one so: Mesh(tp=2)",
        ),
        (
            ["ddp", {"nothing": ("tp",)}],
            MESH,
            "the plan's glob 'nothing' matches no parameter or input; near it: down.weight",
        ),
        (
            {"dwn()": ("?",)},
            MESH,
            "the plan's glob 'dwn()' matches no module that is called and returns one tensor, which the step needs; "
            "near it: down(), (), up()",
        ),
        (
            {"up.weight": ("?",)},
            MESH,
            "the plan's 'up.weight': ('?',) leaves a dim undecided ('?'), which only a module's output may be, unless "
            'the plan is searched, as in ["search", {…}]; give an axis or None',
        ),
        (
            {"up.weight": ("(3 tp)",)},
            MESH,
            "the plan's 'up.weight': ('(3 tp)',) has '(3 tp)', which is no merged dim; write sizes and axes, as in "
            '"(3 -1/tp)"',
        ),
        (
            {"up.weight": ("(5 -1/tp)",)},
            MESH,
            "the plan's 'up.weight': ('(5 -1/tp)',): the parts do not make up a dim of 12, as up.weight has it",
        ),
        (
            {"up.weight": ("(3 5/tp)",)},
            MESH,
            "the plan's 'up.weight': ('(3 5/tp)',): the parts do not make up a dim of 12, as up.weight has it",
        ),
        (
            {"up.weight": ("(-1 -1/tp)",)},
            MESH,
            "the plan's 'up.weight': ('(-1 -1/tp)',): the parts do not make up a dim of 12, as up.weight has it; "
            "leave one size open",
        ),
        (
            {"up.weight": ("(3 4/tq)",)},
            MESH,
            "the plan's 'up.weight': ('(3 4/tq)',): the mesh (dp=2 tp=2) has no axis 'tq'; its axes are dp, tp; did "
            "you mean 'tp'?",
        ),
        (
            {"up.weight": ("(3/tp 4/tp)",)},
            MESH,
            "the plan's 'up.weight': ('(3/tp 4/tp)',) uses the axis 'tp' twice on up.weight; write parts of one size "
            'once, as in "(3 -1/tp)"; if the parts have different sizes, split the dim as one, "tp": the parts '
            "are moved where an op separates them",
        ),
        (
            {"up()": ("tp", "tp")},
            MESH,
            "the plan's 'up()': ('tp', 'tp') uses the axis 'tp' twice on up(); an axis splits one dim of a value once",
        ),
        (
            {"up.weight": (None, "tp", None)},
            MESH,
            "the plan's 'up.weight': (None, 'tp', None) has 3 entries, but up.weight has the shape [12, 8] and only 2 "
            "dims",
        ),
        (
            {"up.weight": (None, None, "tp", None)},
            MESH,
            "the plan's 'up.weight': (None, None, 'tp', None) splits dim 2, but up.weight has the shape [12, 8] and "
            "only 2 dims",
        ),
        (
            {"up()": (None, None, None, "tp")},
            MESH,
            "the plan's 'up()': (None, None, None, 'tp') splits dim 3, but up() has the shape [4, 6, 12] and only 3 "
            "dims",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_plans_that_are_refused(plan: Any, mesh: Mesh, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(Block().double(), mesh, plan, example=(X,))
    assert str(caught.value) == text


MERGED: list[tuple[Spec, DistAttr]] = [
    (("(3 -1/tp)", None), DistAttr((((3, ()), (4, ("tp",))), ((None, ()),)))),
    (("(-1 4/tp)",), DistAttr((((3, ()), (4, ("tp",))), ((None, ()),)))),
    (("( 3/tp  4/dp )",), DistAttr((((3, ("tp",)), (4, ("dp",))), ((None, ()),)))),
    (("(6/tp 2)",), DistAttr.split("tp", None)),  # in normal form
]


@pytest.mark.parametrize(("spec", "attr"), MERGED, ids=str)
def test_merged_dims(spec: Spec, attr: DistAttr) -> None:
    assert resolve({"w": spec}, MESH, {"w": (12, 8)}, {}).attrs == {"w": attr}
    check_equal(Block().double(), MESH, {"up.weight": spec}, (X,))


OUTPUTS: list[tuple[str, Spec]] = [
    ("up()", ("?", "tp", None)),
    ("up()", ("?", "?", "tp")),
    ("up()", (None, None, None)),
    ("act()", ("tp", "dp", None)),
    ("act()", ("(2 2/tp)", None, "dp")),
    ("down()", (("dp", "tp"), None, None)),
    ("()", ("tp", None, None)),
]


@pytest.mark.simulated
@pytest.mark.parametrize(("call", "spec"), OUTPUTS, ids=str)
def test_what_a_module_returns_lies_as_the_plan_says(call: str, spec: Spec) -> None:
    """For all who read it: an op on it, or the model's caller."""
    plan = {"up.weight": ("tp", None), call: spec}
    model = Block().double()
    check_equal(model, MESH, plan, (X,))
    captured = capture(model, (X,))
    program = captured.program
    attrs, _ = constraints(plan, model, MESH, captured)
    run_passes(program, [Place(MESH, attrs)])
    (name,) = captured.modules[call.removesuffix("()")]
    wanted = resolve({call: spec}, MESH, {}, {}, outputs={call: record_of(program.node(name)).type.shape}).attrs[call]
    readers = [user for user in program.node(name).users if user.op == "output" or record_of(user).phase == "forward"]
    assert readers
    for user in readers:
        (need,) = {n for value, n in zip(operands(user), record_of(user).uses, strict=True) if value.name == name}
        assert not need.layout.attr.pending
        for mine, asked in zip(need.layout.attr.dims, wanted.dims, strict=True):
            assert asked in (mine, ((None, ("?",)),)), (user, need)


def test_a_module_that_returns_two_ways() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x).sum(1) + self.act(x.sum(1))

    with pytest.raises(
        PlanError,
        match=r"the plan's layout of act\(\) does not fit all values that it returns: relu_1 : f64\[4 8\]; leave",
    ):
        autopar.parallelize(Twice(), MESH, {"act()": ("tp",)}, example=(X,))


class Nested(nn.Module):
    """Two modules return one value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu()


def test_two_modules_that_return_one_value() -> None:
    """Their layouts are one if they agree; otherwise both are named."""

    def attrs(plan: Any) -> dict[str, DistAttr]:
        return constraints(plan, model, MESH, captured)[0]

    model = Nested().double()
    captured = capture(model, (X,))
    (name,) = captured.modules["up"]
    attr = attrs({"up()": ("?", "tp"), "up.0()": ("dp", "?")})[name]
    assert attr == DistAttr.split("dp", "tp", None)
    with pytest.raises(PlanError) as caught:
        attrs({"up()": ("?", "tp"), "up.0()": ("tp", "?")})
    assert str(caught.value) == (
        f"the plan contradicts itself on {name} : f64[4 6 8], which up.0() and up() both return: up.0() is "
        f"[4/tp 6/? 8], up() is [4/? 6/tp 8]; leave one of them out of the plan"
    )
