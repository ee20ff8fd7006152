"""Optimizers as ops: the steps of torch.optim, also where they are scaled, skipped, scheduled, or continued by the
other."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import F, K, P, call, made
from optimizer_steps import NAMES, OPTIMIZERS, SHAPES, Stepped, drawn, take_step
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from autopar.optimizers import COUNTED, definition_of
from autopar.optimizers.ops import SIGNATURES, UPDATES, scheduled_of
from autopar.rules import RULES
from autopar.runtime.discovery.proof import prove
from autopar.torch_private import FakeTensorMode, call_before_steps, has_kernel, make_fx

DOUBLE = {"rtol": 1e-12, "atol": 1e-12}
SINGLE = {"rtol": 1e-6, "atol": 5e-7}
CASES = pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=NAMES)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in drawn(SHAPES, 0, dtype)]


def check_alike(stepped: Stepped, optimizer: Optimizer, **tolerance: float) -> None:
    """The same parameters, and the same state under the same names."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for ours, state, param in zip(stepped.params, stepped.states, params, strict=True):
        torch.testing.assert_close(ours, param.detach(), **tolerance)
        for name, value in optimizer.state[param].items():
            if value is not None:
                torch.testing.assert_close(state[name], value.detach(), **tolerance)


@CASES
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, DOUBLE), (torch.float32, SINGLE)], ids=["float64", "float32"]
)
def test_ten_steps_are_torchs(
    kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    """In two groups, with a schedule of the learning rate."""
    params = parameters(dtype)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05, "weight_decay": 0.2}]
    optimizer = kind(groups, foreach=False, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    stepped = Stepped(optimizer)
    for k in range(10):
        grads = drawn(SHAPES, k + 1, dtype)
        stepped.step(grads)
        take_step(optimizer, grads)
        schedule.step()
    check_alike(stepped, optimizer, **tolerance)


@st.composite
def chosen(draw: st.DrawFn) -> tuple[type[Optimizer], dict[str, Any]]:
    kind, options = draw(st.sampled_from(OPTIMIZERS))
    numbers = {
        "lr": st.floats(0, 1), "weight_decay": st.sampled_from([0.0, 1e-3, 0.5]), "momentum": st.floats(0, 0.99),
        "eps": st.floats(1e-9, 1e-2), "lr_decay": st.floats(0, 1),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
    }  # fmt: skip
    options = {
        name: draw(numbers[name]) if name in numbers and draw(st.booleans()) else value
        for name, value in options.items()
    }
    if options.get("nesterov") and not options["momentum"]:
        options["momentum"] = 0.9
    return kind, options


@pytest.mark.simulated
@settings(max_examples=60, deadline=None)
@given(
    chosen(),
    st.lists(
        st.tuples(st.sampled_from([None, 0.25, 3.0, 65536.0]), st.sampled_from([None, 0.0, 1.0])),
        min_size=1,
        max_size=6,
    ),
)
def test_scaled_and_skipped_steps(
    case: tuple[type[Optimizer], dict[str, Any]], steps: list[tuple[float | None, float | None]]
) -> None:
    """What torch does with gradients divided before, and without the steps that are skipped; their gradients are not
    finite."""
    kind, options = case
    optimizer = kind(parameters(), **options)
    stepped = Stepped(optimizer)
    for k, (scale, skipped) in enumerate(steps):
        grads = drawn(SHAPES, k + 1)
        scaled = [grad * (scale or 1) for grad in grads]
        if skipped:
            scaled = [grad.fill_(float("inf" if k % 2 else "nan")) for grad in scaled]
        stepped.step(scaled, *(None if number is None else torch.tensor(number) for number in (scale, skipped)))
        if not skipped:
            take_step(optimizer, grads)
    check_alike(stepped, optimizer, rtol=1e-11, atol=1e-11)


@CASES
def test_initial_state_is_torchs(kind: type[Optimizer], options: dict[str, Any]) -> None:
    """In names, shapes, dtypes and values: those after a first step that changes no state but the count."""
    param = nn.Parameter(torch.ones(3, 2).t())
    optimizer = kind([param], **{**options, "weight_decay": 0.0})
    made = definition_of(optimizer).initial(param, optimizer.param_groups[0])
    take_step(optimizer, [torch.zeros_like(param)])
    for name, value in optimizer.state[param].items():
        value = value - 1 if name == "step" else value
        torch.testing.assert_close(made[name], value.detach())
        assert made[name].stride() == value.stride() and not made[name].requires_grad
    assert made.keys() - optimizer.state[param].keys() <= {"step"}


@CASES
def test_each_continues_what_the_other_began(kind: type[Optimizer], options: dict[str, Any]) -> None:
    straight, first = (kind(parameters(), **options) for _ in range(2))
    for k in range(3):
        take_step(straight, drawn(SHAPES, k))
        take_step(first, drawn(SHAPES, k))
    stepped = Stepped(first)
    for k in range(3, 6):
        take_step(straight, drawn(SHAPES, k))
        stepped.step(drawn(SHAPES, k))
    check_alike(stepped, straight, **DOUBLE)

    last = kind([nn.Parameter(param) for param in stepped.params], **options)
    saved = {**last.state_dict(), "state": {k: copy.deepcopy(state) for k, state in enumerate(stepped.states)}}
    last.load_state_dict(saved)
    for k in range(6, 9):
        take_step(straight, drawn(SHAPES, k))
        take_step(last, drawn(SHAPES, k))
    for a, b in zip(straight.param_groups[0]["params"], last.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)


def test_half_precision_is_rounded_once() -> None:
    param, grad = drawn([(50,)], 0, torch.bfloat16) + drawn([(50,)], 1, torch.float16)
    optimizer = AdamW([nn.Parameter(param)], lr=1e-4, weight_decay=0.01)
    (group,) = optimizer.param_groups
    definition = definition_of(optimizer)
    state = definition.initial(param, group)
    lr = torch.tensor(1e-4, dtype=torch.float64)
    new, states = definition.update(group)(param, grad, state, lr)
    assert (new.dtype, states["exp_avg"].dtype, states["step"].dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    wide = {name: value.float() for name, value in state.items()}
    wanted, _ = definition.update(group)(param.float(), grad.float(), wide, lr)
    assert torch.equal(new, wanted.bfloat16())


def test_nothing_is_written_and_nothing_shares_memory() -> None:
    for kind, options in OPTIMIZERS:
        for found_inf in (None, torch.zeros(())):
            stepped = Stepped(kind(parameters(), **options))
            before = [nn.Parameter(stepped.params[0]), drawn(SHAPES[:1], 3)[0], *stepped.states[0].values()]
            kept = [tensor.clone() for tensor in before]
            update = stepped.definition.update(stepped.groups[0])
            new, state = update(
                before[0], before[1], stepped.states[0], torch.tensor(0.1, dtype=torch.float64), None, found_inf
            )
            assert not any(tensor.requires_grad for tensor in (new, *state.values()))
            assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
            storages = [tensor.untyped_storage().data_ptr() for tensor in (*before, new, *state.values())]
            assert len(set(storages)) == len(storages)


def test_a_step_is_traced_to_its_ops() -> None:
    optimizer = AdamW(parameters())
    update = definition_of(optimizer).update(optimizer.param_groups[0])
    assert (update.op, update.states, update.counted) == (
        UPDATES["adamw"],
        ("exp_avg", "exp_avg_sq", "step"),
        ("step",),
    )
    assert update.scheduled == {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01} and update.constants == {
        "eps": 1e-8,
        "maximize": False,
    }

    def step(param: Any, grad: Any, mean: Any, square: Any, count: Any, lr: Any, scheduled: Any) -> Any:
        return update(param, grad, {"exp_avg": mean, "exp_avg_sq": square, "step": count}, lr, scheduled=scheduled)

    with FakeTensorMode():
        x, count = torch.empty(4, 3), torch.empty(())
        graph = make_fx(step)(x, x.half(), x, x, count, count.double(), update.operands()).graph
    ops = [node.target for node in graph.nodes if node.op == "call_function" and "getitem" not in node.name]
    assert ops == [COUNTED, UPDATES["adamw"]]


@CASES
def test_fake_results_are_like_the_real_ones(kind: type[Optimizer], options: dict[str, Any]) -> None:
    """In shape, dtype and strides; the formula is not run for them."""
    turned = [
        tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for tensor in drawn(SHAPES, 0, torch.bfloat16)
    ]
    optimizer = kind([nn.Parameter(tensor) for tensor in turned], **options)
    (group,) = optimizer.param_groups
    definition = definition_of(optimizer)
    update = definition.update(group)
    assert has_kernel(update.op, "meta")
    lr = torch.tensor(0.1, dtype=torch.float64)
    for param in turned:
        given = (
            param,
            param.contiguous().float(),
            *definition.initial(param, group).values(),
            lr,
            torch.ones(()),
            torch.zeros(()),
        )
        wanted = update.function(*given, **update.operands(), **update.constants)
        with FakeTensorMode() as mode:
            found = update.function(*map(mode.from_tensor, given), **update.operands(), **update.constants)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_updates_tell_changed_options() -> None:
    optimizer = SGD(parameters(), lr=0.1, momentum=0.9)
    (group,) = optimizer.param_groups
    definition = definition_of(optimizer)
    before = definition.update(group)
    for number in ("lr", "momentum", "weight_decay"):  # schedulers change them
        assert definition.update({**group, number: 0.2}) == before
    assert definition.update({**group, "momentum": 0.2}).scheduled == {"momentum": 0.2, "weight_decay": 0.0}
    assert definition.update({**group, "nesterov": True}) != before
    assert definition.update({**group, "dampening": 0.1}).op != before.op


# -- which optimizers --------------------------------------------------------------------------------------------------


class Named(AdamW):
    """One that has torch's step."""


class Own(Adam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Another."""


def test_a_class_that_inherits_its_step_is_known() -> None:
    optimizer = Named(parameters())
    assert definition_of(optimizer) is definition_of(AdamW(parameters()))
    assert definition_of(optimizer).update(optimizer.param_groups[0]).op is UPDATES["adamw"]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: Own(parameters()),
            TypeError,
            "Own cannot be part of a step's graph: it does not change the parameters of its groups; train it in the "
            "plain loop, ",
        ),
        (
            lambda: torch.optim.LBFGS(parameters()),
            TypeError,
            "LBFGS cannot be part of a step's graph: it calls the model several times in a step, through a closure; ",
        ),
        (
            lambda: torch.optim.SparseAdam(parameters()),
            TypeError,
            "it takes sparse gradients, and those of a step are dense; train it in the plain loop, ",
        ),
        (
            lambda: nn.Linear(2, 2),
            TypeError,
            "is a Linear and no torch.optim.Optimizer; make one from parallel.parameters()",
        ),
        (
            lambda: Adam(parameters(), differentiable=True),
            ValueError,
            "group 0 of Adam has differentiable=True: gradients do not flow",
        ),
        (
            lambda: SGD([{"params": parameters()}, {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]}]),
            ValueError,
            "parameter 0 in group 1 of SGD is complex64; parameters of a step in the graph are dense and of a "
            "floating dtype",
        ),
        (
            lambda: SGD([("table", nn.Parameter(torch.eye(3).to_sparse()))]),
            ValueError,
            "parameter table in group 0 of SGD is sparse",
        ),
        (
            lambda: AdamW(parameters(), betas=(torch.tensor(0.9), torch.tensor(0.99))),
            ValueError,
            "beta1 of AdamW is a tensor, but the graph would keep its value; give a number",
        ),
    ],
)
def test_what_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        definition_of(make())


def test_hooks_of_a_step_are_refused() -> None:
    optimizer = AdamW(parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    call_before_steps(optimizer, lambda: None)  # as a step that crosses its end
    definition_of(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match=r"AdamW has step hooks, but a step in the graph does not call them: remove them"
    ):
        definition_of(optimizer)


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_rules_hold_on_pieces(name: str) -> None:
    """Of the parameter; what has no dims is whole, and so is a step count that comes out."""
    lying, without_dims, options = SIGNATURES[name]
    numbers = {"maximize": True, "nesterov": True, "eps": 1e-3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}
    given = {option: numbers.get(option, 0.7) for option in options.split()}
    given |= {option: K(given[option]) for option in scheduled_of(name)}
    for shape in ((4, 5), (6,), (2, 1, 3), ()):
        scalars = [K(3.0) for _ in without_dims.split()]
        spec = call(
            F(*shape), F(*shape), *(P(*shape) for _ in lying.split()), *scalars, K(0.1), K(2.0), K(0.0), **given
        )
        proof = prove(UPDATES[name], *made(spec, name))
        assert len(proof.claims) >= sum(size > 1 for size in shape)
    assert not any("sum" in claim for claim in proof.claims)


def test_a_count_has_nothing_to_split() -> None:
    assert RULES[COUNTED].pattern == "(), () -> ()"
    step = torch.tensor(2.0)
    assert [COUNTED(step, found).item() for found in (None, torch.tensor(0.0), torch.tensor(1.0))] == [3, 3, 2]
