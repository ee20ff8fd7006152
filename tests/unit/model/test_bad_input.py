"""Wrong input: one clear error each, which names the offender and the remedy, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from equality import check_equal
from models import Block
from refusals import refuses, x
from torch import nn

import autopar
from autopar import CaptureError, Mesh, PlanError, RuleError
from autopar.rules.registry import RULES

HERE = re.escape("test_bad_input.py")
PLANS = {
    "unknown axis": (
        {"*.up.weight": ("tq", None)},
        r"the plan's '\*\.up\.weight': \('tq', None\): the mesh \(dp=2 tp=2\) has no axis 'tq'; "
        r"its axes are dp, tp; did you mean 'tp'\?",
    ),
    "no match": (
        {"*.upp.weight": ("tp", None)},
        r"the plan's glob '\*\.upp\.weight' matches no parameter or input; near it: up\.weight, down\.weight, "
        r"\w+\.bias",
    ),
    "axis twice": (
        {"up.weight": ("tp", "tp")},
        r"the plan's 'up\.weight': \('tp', 'tp'\) uses the axis 'tp' twice on up\.weight; an axis splits one dim of a "
        r"value once",
    ),
    "axis twice on one dim": (
        {"up.weight": (("tp", "dp", "tp"),)},
        r"the plan's 'up\.weight': \(\('tp', 'dp', 'tp'\),\) uses the axis 'tp' twice on up\.weight; .*",
    ),
    "no such dim": (
        {"up.bias": (None, "tp")},
        r"the plan's 'up\.bias': \(None, 'tp'\) splits dim 1, but up\.bias has the shape \[12\] and only 1 dim",
    ),
    "contradiction": (
        {"*.weight": ("tp",), "*.down.weight": (None, "tp")},
        r"the plan contradicts itself on down\.weight: '\*\.weight' says \('tp',\), '\*\.down\.weight' says "
        r"\(None, 'tp'\); make the globs disjoint",
    ),
    "a string": (
        {"up.weight": "tp"},
        r"the plan's 'up\.weight': 'tp' is not a tuple with an axis or None for each dim, as in \(\"tp\", None\)",
    ),
    "a number in it": (
        {"up.weight": (0,)},
        r"the plan's 'up\.weight': \(0,\) has 0 where an axis, a tuple of axes or None belongs",
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans(case: str) -> None:
    plan, text = PLANS[case]
    refuses(PlanError, text, Block(), plan=plan)


def test_a_value_without_dims_cannot_be_split() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    refuses(
        PlanError,
        r"the plan's 'scale': \('tp',\) splits dim 0, but scale has the shape \[\] and only 0 dims; "
        r"a value without dims cannot be split",
        Scaled(),
        plan={"scale": ("tp",)},
    )


@pytest.mark.simulated
def test_globs_that_agree_are_no_contradiction() -> None:
    plans = ({"*.up.weight": ("tp", None), "up.*": ("tp",)}, {"up.weight": ("tp", None), "up.bias": ("tp",)})
    globs, names = (str(autopar.parallelize(Block(), Mesh(tp=2), plan, example=(x,)).program) for plan in plans)
    assert globs == names


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.sum() > 0:
            return y
        return -y


def test_control_flow_on_values() -> None:
    refuses(
        CaptureError,
        rf"forward returns or breaks only for some values of a tensor\n"
        rf"    {HERE}:\d+  if y\.sum\(\) > 0:   in module the root\n"
        rf"  keep the choice inside the graph with torch\.where, or move it out of forward",
        Choice(),
    )


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.inner(x))


def test_an_op_without_a_rule_is_refused_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, torch.ops.aten.linalg_inv_ex.default)
    refuses(
        RuleError,
        rf"linalg_inv_ex: no sharding rule for linalg_inv_ex \(rules exist for .*\); if it works element by element, "
        rf"register one in a line:\n"
        rf'    autopar\.register_rule\("\.\.\. -> \.\.\., \.\.\.", "aten::linalg_inv_ex"\)\n'
        rf"    {HERE}:\d+  return torch\.linalg\.inv\(self\.inner\(x\)\)   in module the root",
        Inverse(),
        strict=True,
    )


@pytest.mark.simulated
def test_an_op_without_a_rule_is_computed_whole_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, torch.ops.aten.linalg_inv_ex.default)
    model = Inverse().double()
    given = torch.randn(4, 8, dtype=torch.float64)
    parallel = check_equal(model, Mesh(dp=2, tp=2), {"inner.weight": ("tp", None), "inner.bias": ("tp",)}, (given,))
    (note,) = parallel.reports["place"].notes
    assert re.fullmatch(
        rf"linalg_inv_ex has no sharding rule, and none was found: it can be split along no dim; each rank "
        rf"computes all of it, on whole operands \(1 times, \d+ bytes gathered, 132 bytes of results\); "
        rf"register_rule one, or refuse it with strict=True\n"
        rf"    {HERE}:\d+  return torch\.linalg\.inv\(self\.inner\(x\)\)   in module the root",
        note,
    )
    assert note in str(parallel.reports)


def test_the_remedy_for_an_op_without_a_rule() -> None:
    """A custom op is refused until one line registers its rule, with its size of result rewritten and all."""
    library = torch.library.Library("autopar_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")

    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.autopar_test.twice(x)

    with torch.no_grad():
        with pytest.raises(RuleError, match=r'autopar.register_rule\("... -> ...", "autopar_test::twice"\)'):
            autopar.parallelize(Custom(), Mesh(dp=2), "ddp", example=(x,), strict=True)
        autopar.register_rule("... -> ...", "autopar_test::twice", linear="0")
        parallel = autopar.parallelize(Custom(), Mesh(dp=2), "ddp", example=(x,))
        assert torch.equal(parallel.simulate(x), 2 * x)
        assert "autopar_test::twice(x)" in str(parallel.program)


def test_a_wrong_pattern_and_an_unknown_op() -> None:
    with pytest.raises(ValueError, match=r"rule 'a b': it needs exactly one '->'"):
        autopar.register_rule("a b", "aten::cumsum")
    with pytest.raises(RuleError, match=r"torch has no op 'nowhere::op'; write it as 'add.Tensor' or 'library::op'"):
        autopar.register_rule("... -> ...", "nowhere::op")


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2


def test_writing_into_an_argument() -> None:
    refuses(
        CaptureError,
        rf"the step writes into its argument x, which the caller would see changed\n"
        rf"    {HERE}:\d+  x \+= 1   in module the root\n"
        rf"  write out of place \(x = x \+ 1 instead of x \+= 1\)",
        Writes(),
    )


def test_an_argument_that_cannot_be_flattened() -> None:
    class Takes(Block):
        def forward(self, x: torch.Tensor, extra: object) -> torch.Tensor:
            return super().forward(x)

    refuses(
        CaptureError,
        r"argument extra is an object, which capture cannot look into; pass tensors, numbers, strings, or containers "
        r"and "
        r"dataclasses of them",
        Takes(),
        example=(x, object()),
    )


def test_a_result_that_cannot_be_flattened() -> None:
    class Gives(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return {"y": x, "what": {1, 2}}

    refuses(
        CaptureError, r"the model returns a set, which capture cannot look into; return tensors, numbers or .*", Gives()
    )


def test_wrong_types() -> None:
    refuses(
        TypeError, r"parallelize takes an autopar\.Mesh, as in autopar\.Mesh\(dp=2, tp=2\), not int", Block(), mesh=4
    )
    refuses(
        TypeError,
        r"example is the arguments of one call: a tuple \(x,\), a dict of keywords, or both \(\(x,\), \{'labels': "
        r"y\}\), not a Tensor",
        Block(),
        example=x,
    )
    with pytest.raises(TypeError, match=r"parallelize takes a torch\.nn\.Module, not function"):
        autopar.parallelize(lambda x: x, Mesh(dp=2))


def test_the_plan_is_checked_before_a_capture() -> None:
    with pytest.raises(PlanError, match="no axis 'tq'"):
        autopar.parallelize(Block(), Mesh(tp=2), {"up.weight": ("tq",)})


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "60", None])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(ValueError, match="is not a number of seconds above 0"):
        autopar.parallelize(Block(), Mesh(dp=2), timeout=timeout)


@pytest.mark.parametrize("switch", ["strict", "recapture"])
def test_a_switch_that_is_none(switch: str) -> None:
    with pytest.raises(TypeError, match=f"{switch}='yes' is neither True nor False"):
        autopar.parallelize(Block(), Mesh(dp=2), **{switch: "yes"})


def test_calling_without_processes() -> None:
    parallel = autopar.parallelize(Block(), Mesh(dp=2), "ddp", example=(x,))
    with pytest.raises(RuntimeError) as caught:
        parallel(x)
    assert str(caught.value) == (
        "the mesh (dp=2) needs 2 processes, and this one is alone; start them with torchrun --nproc-per-node 2 "
        "and call parallelize in each, or call .simulate(...) to run all ranks in this process"
    )


@pytest.mark.parametrize("what", ["program", "reports"])
def test_looking_before_a_capture(what: str) -> None:
    parallel = autopar.parallelize(Block(), Mesh(dp=2))
    with pytest.raises(RuntimeError) as caught:
        getattr(parallel, what)
    assert str(caught.value) == (
        "nothing has been captured yet; give parallelize an example=(x,), or call .simulate(x) once"
    )
    parallel.simulate(x)
    assert getattr(parallel, what)


def test_looking_before_the_model_is_cut() -> None:
    parallel = autopar.parallelize(Block(), Mesh(pp=2, dp=2), example=(x,))
    with pytest.raises(RuntimeError) as caught:
        parallel.timetable  # noqa: B018
    assert str(caught.value) == (
        "nothing has been captured yet: the first training step cuts the model into stages, and calls run through them "
        "from then on; capture a step, then call .simulate(x) once"
    )


def test_a_rank_that_is_not_there() -> None:
    parallel = autopar.parallelize(Block(), Mesh(dp=2), "ddp", example=(x,))
    with pytest.raises(ValueError, match=r"rank 2 is not on the mesh \(dp=2\), whose ranks are 0 1"):
        parallel.local(2)


class Swallows(Choice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        try:
            return y * y.sum().item()
        except RuntimeError:
            return y


def test_control_flow_that_the_model_caught() -> None:
    with pytest.raises(CaptureError, match=r"test_bad_input\.py:\d+  return y \* y\.sum\(\)\.item\(\)"):
        autopar.parallelize(Swallows(), Mesh(dp=2), "ddp", example=(x,))
