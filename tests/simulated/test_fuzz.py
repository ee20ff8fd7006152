"""Random models on random meshes under random plans equal one device, or are refused with the reason; and what such
cases found.

Here a few, the same each time; ``python profiling/run.py fuzz`` runs thousands.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzz_axes import AXES as OF_REPORTS
from fuzz_axes import on_axis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from model_cases import FAILED, OTHER, Case, check
from random_lines import FAMILIES
from random_models import AXES, Models, random_case
from searched import FAST
from smaller_cases import smallest
from torch.distributed.tensor import Replicate, Shard  # noqa: F401  what literals say

from autopar.capture.guards import Guards
from autopar.ir import transfers
from autopar.runtime.simulation import effects

AGREE = ("equal", "sensitive", "refused")


def agrees(case: Case, kinds: tuple[str, ...]) -> bool:
    """Whether a case ends so; otherwise all of it is printed."""
    outcome = check(case)
    if outcome.kind not in kinds:
        print(case.literal(), case.script(), outcome.reason, outcome.text, sep="\n\n")
    return outcome.kind in kinds


@pytest.mark.long
@settings(
    max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(st.randoms(use_true_random=False))
def test_random_models_equal_one_device_or_are_refused(r: random.Random) -> None:
    case = random_case(r)
    outcome = check(case)
    assume(outcome.kind != "invalid")
    assert outcome.kind in AGREE or agrees(smallest(case, seconds=20), AGREE)


def searching(case: Case, r: random.Random) -> Case:
    """The same case on 2 × 2 ranks under a searched plan; its own plan constrains every other search that it fits.

    On a machine on which values of a few elements are worth splitting.
    """
    mesh = dict.fromkeys([*case.mesh, *(axis for axis in AXES if axis not in case.mesh)][:2], 2)
    own = case.plan if isinstance(case.plan, list) else [case.plan] * bool(case.plan)
    constraints = own if [*mesh] == [*case.mesh] and r.randrange(2) else []
    options = {**case.options, "machine": FAST, "time_limit": 5.0}
    return replace(case, mesh=mesh, plan=["search", *constraints], options=options)


@pytest.mark.long
@settings(
    max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(st.randoms(use_true_random=False))
def test_random_models_under_searched_plans_equal_one_device(r: random.Random) -> None:
    """Of few lines: each size of a value has its own transfers, which are priced anew."""
    case = random_case(r)
    assume(len(case.lines) <= 2)
    case = searching(case, r)
    outcome = check(case)
    assume(outcome.kind != "invalid")
    assert outcome.kind in AGREE or agrees(smallest(case, seconds=60), AGREE)


def on_an_axis(axis: str) -> Case:
    """The first case of few lines that eager takes."""
    for seed in range(60):
        r = random.Random(seed)
        case = random_case(r)
        if len(case.lines) <= 2 and (added := on_axis(axis, case, r)) is not None and check(added).kind != "invalid":
            return added
    raise AssertionError(axis)


@pytest.mark.long
@pytest.mark.parametrize("axis", OF_REPORTS)
def test_cases_of_reports_equal_one_device_or_are_refused(axis: str) -> None:
    case = on_an_axis(axis)
    with effects.adding_orders(0):
        assert agrees(case, ("refused",) if axis == "generator" else AGREE)


@pytest.mark.long
def test_a_plan_is_searched_over_three_axes() -> None:
    weight = "self.w = nn.Parameter(torch.randn(8))"
    mesh = {"dp": 2, "cp": 2, "tp": 2}
    inputs = {"a": "real(8, 8, grad=True)"}
    case = Case(("v = a @ self.w",), "v", inputs, mesh, "search", (weight,), options={"machine": FAST})
    outcome = check(case)
    assert outcome.kind == "equal" and outcome.transfers


# -- what the fuzzer found -----------------------------------------------------------------------------------------

FOUND: dict[str, Case] = {
    "a gradient that no tangent reaches is zero only where the loss depends on it": Case(
        ("v = torch.copysign(a, b)", "w = c * 2"),
        "(v, w)",
        {"a": "real(3, grad=True)", "b": "real(3, grad=True)", "c": "real(3, grad=True)"},
        {"dp": 2},
        {},
        given=(1,),
    ),
    "the same where the loss is of it": Case(
        ("v = torch.copysign(a, b)", "w = c * 2"),
        "(v, w)",
        {"a": "real(3, grad=True)", "b": "real(3, grad=True)", "c": "real(3, grad=True)"},
        {"dp": 2},
        {},
        given=(0,),
    ),
    "repeated beside a split dim of size one": Case(("v = a.tile((2,))",), "v", {"a": "real(1, 1, 2)"}, {"dp": 2}, {}),
    "as_strided": Case(
        ("v = a.as_strided(a.shape, a.stride())",), "v", {"a": "real(3, 3, 4, grad=True)"}, {"dp": 2}, {}
    ),
    "a view that needs more of a pending value than its sum": Case(
        ("v = F.linear(self.p, self.w, self.b)", "u = v.abs()", "w = v.view(3, 2)"),
        "(u, w)",
        {"a": "real(3)"},
        {"dp": 2, "cp": 2},
        {"w": (None, "cp"), "b": ("dp",)},
        (
            "self.p = nn.Parameter(torch.randn(2, 4))",
            "self.w = nn.Parameter(torch.randn(3, 4))",
            "self.b = nn.Parameter(torch.randn(3))",
        ),
    ),
    "a plan for what a norm returns, beside a write": Case(
        ("w = b.clone()", "w.add_(1)", "v = self.l(a)"),
        "(v, w)",
        {"a": "real(4, 4)", "b": "real(3)"},
        {"tp": 2},
        {"*.l()": (None, "tp")},
        ("self.l = nn.LayerNorm(4)",),
    ),
    "dropout of what lies transposed": Case(
        ("v = F.dropout(self.l(a.transpose(0, 1)).transpose(0, 1), 0.3)",),
        "v",
        {"a": "real(3, 6, 6)"},
        {"dp": 2},
        {},
        ("self.l = nn.Linear(6, 6)",),
        options={"random": "single"},
    ),
    "dropout in layers that turn the batch": Case(
        ("v = self.l(a)",),
        "v",
        {"a": "real(6, 2, 6)"},
        {"tp": 2},
        {},
        ("self.l = nn.TransformerEncoderLayer(6, 3, 12, dropout=0.2, batch_first=True)",),
        options={"random": "single"},
    ),
    "numbers drawn for what lies transposed, where they do not": Case(
        ("v = F.gumbel_softmax(a.mT)",),
        "v",
        {"a": "real(4, 6, grad=True)"},
        {"dp": 2},
        {},
        options={"random": "single"},
    ),
    "numbers drawn into what lies transposed": Case(
        ("v = a.mT + torch.empty_like(a.mT).exponential_()",),
        "v",
        {"a": "real(4, 6, grad=True)"},
        {"dp": 2},
        {},
        options={"random": "single"},
    ),
    "an input that is returned twice, and no op of the forward": Case(
        ("v = F.dropout(a, 0.0)",), "[v, v]", {"a": "real(3, 6, grad=True)"}, {"tp": 4, "cp": 2}, {"a": (("cp", "tp"),)}
    ),
    "a searched plan keeps constants whole": Case(
        ("v = a.index_put((torch.tensor([1, 1]),), a[0], accumulate=True)",),
        "v",
        {"a": "real(2, 5, grad=True)"},
        {"dp": 2},
        "search",
        options={"machine": FAST},
    ),
    "an input that is returned, in a layout that no search would try": Case(
        ("v = F.dropout(a, 0.0)", "w = a.abs()"),
        "(v, w)",
        {"a": "real(3, 1, 4, grad=True)"},
        {"tp": 2, "dp": 2},
        ["search", {"a": ("dp", "tp", None)}],
        options={"machine": FAST},
    ),
    "a mask with a tensor's values, beside a vmap": Case(
        ("v = torch.vmap(lambda t: t * t.sum())(a)", "w = a * 1.0", "w[w.detach()[..., 0] > 0.1] = self.t"),
        "(v, w)",
        {"a": "real(4, 3, grad=True)"},
        {"dp": 2},
        {},
        ("self.t = nn.Parameter(torch.tensor(0.3))",),
    ),
    "a view of a view, in place": Case(
        ("v = a.reshape(-1).clone()", "v.unsqueeze(0).mul_(3)"), "v", {"a": "real(3, grad=True)"}, {"dp": 2}, {}
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_found_by_the_fuzzer(case: Case) -> None:
    assert agrees(case, ("equal",))


REFUSED: dict[str, tuple[Case, str]] = {
    "a layer that is called with several shapes": (
        Case(("v = self.l(a)", "w = self.l(b)"), "(v, w)", {"a": "real(3, 4)", "b": "real(5, 4)"}, {"tp": 2},
             {"*.l()": (None, "tp")}, ("self.l = nn.Linear(4, 4)",)),
        r"the plan's layout of l\(\) does not fit all values that it returns.*; leave l\(\) out of the plan"),
    "what is read, and then written, in a branch without a loss": (
        Case(("v = a * self.b", "self.b.copy_(a.detach())"), "(v, c)",
             {"a": "real(3, grad=True)", "c": "real(2, grad=True)"}, {"dp": 2}, {},
             ('self.register_buffer("b", torch.ones(3))',), given=(1,)), r"model_of_case.py:\d+"),
    "a layer whose output nobody reads": (
        Case(("v = self.l(a)", "w = a * 2"), "w", {"a": "real(3, 4)"}, {"tp": 2}, {"*.l()": (None, "tp")},
             ("self.l = nn.Linear(4, 4)",)),
        r"matches no module that is called and returns one tensor, which the step needs"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "said"), REFUSED.values(), ids=REFUSED)
def test_refusals_found_by_the_fuzzer(case: Case, said: str) -> None:
    outcome = check(case)
    assert outcome.kind == "refused" and re.search(said, outcome.text), outcome


# -- the fuzzer itself ---------------------------------------------------------------------------------------------


def _unreduced(xs: list[torch.Tensor], givens: Any, there: Any) -> list[torch.Tensor]:
    return [xs[0]] * len(xs)


@pytest.mark.long
def test_a_lost_all_reduce_is_caught_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all-reduces that return the first rank's addend cases fail; the smallest is a few lines on one axis."""
    monkeypatch.setitem(effects.COLLECTIVE, transfers.all_reduce, _unreduced)
    cases = (random_case(random.Random(seed)) for seed in range(40))
    failed = next(case for case in cases if 3 <= len(case.lines) <= 6 and check(case).reason.startswith(OTHER))
    small = smallest(failed, seconds=60)
    assert check(small).kind == FAILED and len(small.lines) <= 3 and len(small.mesh) == 1, small.literal()


def test_an_accepted_payload_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank sends is changed, and refused; and would be told if it were not."""
    case = Case(
        ("v = self.l(a)",),
        "v",
        {"a": "real(4, 6, grad=True)"},
        {"dp": 2},
        {"a": ("dp", None)},
        ("self.l = nn.Linear(6, 3)",),
    )
    assert check(case, mutations=20).kind == "equal"
    monkeypatch.setattr("payload_mutations.check_programs", lambda programs: None)
    assert check(case, mutations=20).reason.startswith("a change of a payload is accepted: another ")


def test_a_stale_attribute_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose attribute changes between calls agrees with eager, and would not without guards."""
    case = Case(
        ("v = a * self.n",),
        "v",
        {"a": "real(4, grad=True)"},
        {"dp": 2},
        {},
        ("self.n = 0.5",),
        calls=3,
        changes=("self.n = 2.0", "self.n = 0.0"),
    )
    assert agrees(case, ("equal",))
    monkeypatch.setattr(Guards, "hold", lambda self, modules: True)
    assert check(case).reason.startswith(OTHER)


def test_attributes_that_change_are_drawn() -> None:
    """Of numbers, flags, words, dicts and configs."""
    changes = {change for seed in range(60) for change in random_case(random.Random(seed)).changes}
    assert len(changes) > 10 and all(
        any(part in change for change in changes) for part in ('["c"]', ".first", "True", "'b'", "0.5")
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_case_is_made_again_from_its_text(seed: int) -> None:
    """A seed gives one case, and the case's literal is it."""
    case = random_case(random.Random(seed))
    assert random_case(random.Random(seed)) == case
    assert eval(case.literal()) == case


def test_a_printed_case_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(
        ("v = self.l(a)", "w = v * b"),
        "(v, w)",
        {"a": "real(4, 6)", "b": "0.7"},
        {"dp": 2},
        {"a": ("dp", None)},
        ("self.l = nn.Linear(6, 3)",),
    )
    exec(compile(case.script(), "case.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("(tensor(")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_template_can_be_a_line(family: str) -> None:
    """Each template can be filled and run, so that none is passed over forever."""
    r = random.Random(0)
    never = set(FAMILIES[family][1])
    for _ in range(60):
        models = Models(r)
        for dims in (1, 2, 3, 4, 3):
            models.input(f"real({', '.join(str(r.choice((2, 3, 4))) for _ in range(dims))})")
        for template in sorted(never):
            filled = models.filled(template)
            if filled is not None and models.add(
                filled.replace("{v}", "v9") if "{v}" in filled else f"v9 = {filled}", "v9"
            ):
                never.discard(template)
    assert not never
