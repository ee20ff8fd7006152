"""Plans: what they may be written with, what is said of others, and tensors with several names."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import autopar
from autopar.errors import PlanError, class_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.plan.plan import of_the_batch, resolve

mesh = Mesh(dp=2, tp=2)
SHAPES = {"up.weight": (12, 8), "up.bias": (12,), "scale": (), "cube": (4, 4, 4)}
UP = DistAttr.split("tp", None)


def attrs(plan: Any, **kwargs: Any) -> dict[str, DistAttr]:
    return resolve(plan, mesh, SHAPES, {}, **kwargs).attrs


def refused(plan: Any, inputs: Any = None, **kwargs: Any) -> str:
    with pytest.raises(PlanError) as caught:
        resolve(plan, mesh, SHAPES, inputs, **kwargs)
    return str(caught.value)


NOT_PLANS = [{"up.weight"}, 3, 0, True, b"ddp"]


@pytest.mark.parametrize("plan", NOT_PLANS, ids=repr)
def test_what_is_not_a_dict(plan: object) -> None:
    assert refused(plan) == (
        'a plan is a dict from globs to an axis or None for each dim, as in {"*.up.weight": ("tp", None)}, '
        f'the name of a preset, "search", or a list of these, not {class_of(plan)}: {plan!r}'
    )


@pytest.mark.parametrize(
    ("plan", "wrong"), [([("up.weight", ("tp",))], "a tuple"), (["ddp", 5], "an int"), ([None], "a NoneType")], ids=str
)
def test_what_is_no_plan_in_a_list(plan: list[object], wrong: str) -> None:
    assert refused(plan).endswith(f"or a list of these, not {wrong}: {plan[-1]!r}")


@pytest.mark.parametrize("key", [3, None, ("up", "weight"), b"up.weight"])
def test_a_key_that_is_no_string(key: object) -> None:
    assert refused({key: ("tp",)}) == (
        f"the plan's key {key!r} is not a string; a key is a glob over the names of parameters and inputs, "
        'as in "*.up.weight"'
    )


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        ({"*.up.bias": "tp"}, '("tp",)'),
        ({"*.up.bias": "dp"}, '("dp",)'),
        ({"*.up.weight": "tp"}, '("tp", None)'),
        ({"cube": "tp"}, '("tp", None, None)'),
        ({"scale": "tp"}, "()"),
        ({"*.up.weight": b"tp"}, '("tp", None)'),
        ({"*.up.weight": {"tp"}}, '("tp", None)'),
        ({"*.up.weight": None}, '("tp", None)'),
        ({"*.up.weight": 2}, '("tp", None)'),
        ({"an_input": "dp"}, '("dp",)'),  # not known yet, and wrong all the same
    ],
    ids=str,
)
def test_a_value_that_is_no_tuple(plan: dict[str, Any], remedy: str) -> None:
    ((glob, spec),) = plan.items()
    assert refused(plan) == (
        f"the plan's {glob!r}: {spec!r} is not a tuple with an axis or None for each dim, as in {remedy}"
    )


@pytest.mark.parametrize("entry", [0, b"tp", {"tp"}, True, 1.5], ids=repr)
def test_an_entry_of_the_wrong_type(entry: object) -> None:
    assert refused({"up.weight": (None, entry)}) == (
        f"the plan's 'up.weight': (None, {entry!r}) has {entry!r} where an axis, a tuple of axes or None belongs"
    )


@pytest.mark.parametrize("inner", [["dp"], ("dp",), None, 0, b"dp"], ids=repr)
def test_an_axis_of_the_wrong_type(inner: object) -> None:
    assert refused({"up.weight": (["tp", inner],)}) == (
        f"the plan's 'up.weight': (['tp', {inner!r}],) has {inner!r} in ['tp', {inner!r}], "
        'where only axes belong, as in ("dp", "tp")'
    )


def test_a_wrong_axis_is_told_before_its_input_is_known() -> None:
    assert refused({"an_input": ("tq",)}).startswith(
        "the plan's 'an_input': ('tq',): the mesh (dp=2 tp=2) has no axis 'tq'"
    )
    assert resolve({"an_input": ("tp",)}, mesh, SHAPES, None).attrs == {}


def test_lists_and_other_mappings_are_accepted() -> None:
    assert attrs({"up.weight": ["tp", None]}) == attrs(OrderedDict({"up.weight": ("tp", None)})) == {"up.weight": UP}
    assert attrs({"up.weight": [["dp", "tp"]]}) == attrs({"up.weight": (("dp", "tp"),)})
    assert attrs(None) == attrs({}) == attrs([]) == attrs([{}, {}]) == {}


ALIASES = {"head.weight": "up.weight", "tail.weight": "up.weight"}


@pytest.mark.parametrize("glob", ["head.weight", "*.head.*", "tail.weight", "up.weight", "*.weight"])
def test_a_glob_finds_a_tensor_under_any_name(glob: str) -> None:
    assert attrs({glob: ("tp", None)}, aliases=ALIASES) == {"up.weight": UP}


def test_names_that_are_split_alike_are_no_contradiction() -> None:
    plan = {"head.weight": ("tp",), "up.weight": ("tp", None), "*.weight": ["tp"]}
    assert attrs(plan, aliases=ALIASES) == {"up.weight": UP}


@pytest.mark.parametrize(
    ("first", "second"), [("head.weight", "up.weight"), ("up.weight", "head.weight"), ("head.weight", "tail.weight")]
)
def test_two_names_of_one_tensor_split_differently(first: str, second: str) -> None:
    assert refused({first: ("tp", None), second: (None, "tp")}, aliases=ALIASES) == (
        f"the plan contradicts itself on one tensor with the names {first} and {second}: {first!r} says ('tp', None), "
        f"{second!r} says (None, 'tp'); split it alike under both names"
    )


def test_one_name_split_differently_stays_a_matter_of_that_name() -> None:
    assert refused({"*.weight": ("tp",), "head.weight": (None, "tp")}, aliases=ALIASES) == (
        "the plan contradicts itself on head.weight: '*.weight' says ('tp',), 'head.weight' says (None, 'tp'); "
        "make the globs disjoint"
    )


def test_errors_tell_the_name_that_was_found() -> None:
    assert refused({"head.weight": (None, None, "tp")}, aliases=ALIASES) == (
        "the plan's 'head.weight': (None, None, 'tp') splits dim 2, but head.weight has the shape [12, 8] and only 2 "
        "dims"
    )
    assert "near it: head.weight" in refused({"heads.weight": ("tp",)}, {}, aliases=ALIASES)


def test_an_alias_is_no_input() -> None:
    """A plan for a tied parameter alone leaves the default for the batch as it is."""
    found = resolve({"head.weight": ("tp",)}, mesh, SHAPES, {"x": (4, 8)}, aliases=ALIASES)
    assert found.attrs == {"up.weight": UP, "x": DistAttr.split("dp", None)}


def test_an_input_that_a_plan_names_whole() -> None:
    """Leaves the default to the others, also where it comes first, and is as long as the batch; one that is split takes
    it from all."""
    inputs = {"mask": (4, 4), "x": (4, 8), "y": (4,)}
    for whole in ((None, None), (Replicate(), Replicate())):
        found = resolve({"mask": whole}, mesh, {}, inputs)
        assert found.attrs == {
            "mask": DistAttr.replicated(2),
            "x": DistAttr.split("dp", None),
            "y": DistAttr.split("dp"),
        }
        assert found.notes == [
            "dp splits dim 0 of the inputs x, y (the batch, 4); name inputs in the plan to change it"
        ]
    assert resolve({"mask": (None, None), "y": ("dp",)}, mesh, {}, inputs).attrs == {
        "mask": DistAttr.replicated(2),
        "y": DistAttr.split("dp"),
    }


def test_whether_dim_0_of_what_a_plan_names_is_the_batch() -> None:
    inputs = {"x": 2, "mask": 2, "none": 0}

    def asked(plan: Any, **sizes: int) -> dict[str, bool]:
        return of_the_batch(plan, Mesh(sizes), inputs)

    assert asked(None, dp=2) == asked("megatron", dp=2, tp=2) == {}
    assert asked({"x": ("dp",), "*mask": (None, "dp")}, dp=1) == {"x": True, "mask": False}
    assert asked({"x": (("tp", "dp"),), "mask": ("tp",)}, dp=1, tp=2) == {"x": True, "mask": False}
    assert asked({"x": ("ep",), "mask": ("cp",), "none": ()}, ep=2, cp=2) == {"x": True, "mask": False, "none": False}
    assert asked({"x": ("(2 -1/dp)",)}, dp=2) == {"x": True}
    assert asked({"x": (Replicate(), Shard(0)), "mask": (Shard(0), Shard(-1))}, tp=2, dp=1) == {
        "x": True,
        "mask": False,
    }
    assert asked({"x": (Replicate(), Shard(-2))}, tp=2, dp=1) == {"x": True}
    assert asked([{"x": ("dp",)}, {"x": (None,)}], dp=2) == {"x": False}  # the later has the last word
    assert asked({"x": (None,), "mask": ("tp",)}, tp=2) == {}  # a mesh without an axis of the batch


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.up(batch["x"]) * batch["mask"]


@pytest.mark.parametrize("glob", ["*.upp.weight", "blocks.*.weight", "*.weigth", "up.biass"])
def test_a_glob_that_ends_as_a_parameter_does_is_checked_before_a_call(glob: str) -> None:
    with pytest.raises(PlanError, match=r"the plan's glob '.*' matches no parameter.*; near it: "):
        autopar.parallelize(Masked(), Mesh(tp=2), {glob: ("tp",)})


@pytest.mark.parametrize("glob", ["*.mask", "batch.mask", "weight_of_rows", "*.x", "batch.*"])
def test_a_glob_that_may_mean_an_input_waits_for_the_call(glob: str) -> None:
    autopar.parallelize(Masked(), Mesh(tp=2), {glob: ("tp", None)})
