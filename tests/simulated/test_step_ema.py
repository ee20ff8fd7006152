"""The moving average of the weights is that of torch's ``AveragedModel``: its numbers, its memory, where it goes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import loops
import pytest
import steps
import torch
from equality import relative
from hypothesis import given, settings
from hypothesis import strategies as st
from presets import preset_of
from processes import ranks
from steps import Pair, Single, adamw, narrow, run
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar import Mesh, checkpoint
from autopar.ir.nodes import record_of
from autopar.optimizers import AVERAGED, IN_PLACE
from autopar.report.liveness import size
from autopar.runtime.discovery.proof import prove

DECAY = 0.9


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


class Reads:
    """``AveragedModel`` of a step's own weights."""

    def __init__(self, step: Any) -> None:
        self.step, self.model = step, copy.deepcopy(step.parallel.module) if step.parallel.job is None else None
        self.average = None if self.model is None else averaged(self.model)

    def update(self) -> None:
        """After a step."""
        if self.average is not None:
            self.average.update_parameters(self.step.parallel.module)

    def check(self) -> None:
        """Bit for bit."""
        if self.average is not None:
            for name, wanted in self.average.module.named_parameters():
                assert torch.equal(self.step.ema[name], wanted), name


def frozen(model: nn.Module) -> nn.Module:
    """With its first layer frozen."""
    next(model.children()).requires_grad_(False)
    return model


def averages_alike(name: str, sizes: dict[str, int], options: Mapping[str, Any],
                   prepare: Callable[[nn.Module], nn.Module] = lambda model: model, count: int = 4,
                   called: bool = False) -> None:  # fmt: skip
    """After each step the averages are those of a single device, and bit for bit those of the step's own weights."""
    torch.manual_seed(0)
    make, batches, plan = steps.MODELS.get(
        name, (lambda: Pair().double(), lambda k: {**steps.vectors(k), "y": steps.vectors(k + 9)["x"]}, None)
    )
    model = prepare(make())
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else "ddp")
    step, single = (
        parallel.train_step(adamw(parallel), ema=DECAY, **options),
        Single(alone, adamw(alone), options.get("clip_norm")),
    )
    wanted, own = averaged(alone), Reads(step)
    for k in range(count):
        run(step, batches(k), called=called), single(**batches(k))
        wanted.update_parameters(alone), own.update()
        own.check()
        averages = dict(wanted.module.named_parameters())
        assert step.ema.keys() == averages.keys()
        worst = max(relative(loops.whole(step.ema[name]), average) for name, average in averages.items())
        assert worst <= 1e-9, (k, worst)
    assert int(step.averages.count) == count and step.captures == 1
    with step.averaged():
        for (name, ours), theirs in zip(parallel.named_parameters(), wanted.module.parameters(), strict=True):
            assert relative(loops.whole(ours), theirs) <= 1e-9, name


OPTIONS = {"microbatches": 2, "clip_norm": 0.5}


FOUR, SQUARE = {"dp": 4}, {"dp": 2, "tp": 2}
EITHER = pytest.mark.sweep("each mesh and each stage of ZeRO occurs in another case")


@pytest.mark.parametrize(("name", "sizes", "zero"), [
    ("pair", FOUR, 0), ("mlp", SQUARE, 1), ("pair", FOUR, 2), ("mlp", SQUARE, 3),
    *(pytest.param(*case, marks=EITHER) for case in [
        ("mlp", SQUARE, 0), ("pair", FOUR, 1), ("mlp", SQUARE, 2), ("pair", FOUR, 3),
    ]),
], ids=str)  # fmt: skip
def test_steps(name: str, sizes: dict[str, int], zero: int) -> None:
    averages_alike(name, sizes, {**OPTIONS, "zero": zero})


@pytest.mark.parametrize(("name", "prepare"), [
    ("gpt2", None), ("pair", frozen),
    pytest.param("llama", None, marks=pytest.mark.sweep("gpt2 has blocks, and a tied weight")),
])  # fmt: skip
def test_tied_and_frozen_weights(name: str, prepare: Any) -> None:
    """Tied weights have one average; a frozen one is its own."""
    averages_alike(name, {"dp": 2, "tp": 2}, {"zero": 1}, *([prepare] if prepare else []), count=3)


def on_processes() -> None:
    for zero in (0, 1, 3):
        averages_alike("mlp", {"dp": 2}, {**OPTIONS, "zero": zero})
    averages_alike("pair", {"dp": 2}, {"zero": 1}, frozen, count=3)
    frozen_later({"dp": 2})
    evaluated({"dp": 2}, 1)


@pytest.mark.processes
def test_on_processes() -> None:
    ranks(2).run(on_processes)


def test_one_process() -> None:
    averages_alike("mlp", {"dp": 1}, OPTIONS, count=3, called=True)


# -- the op ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(
    decay=st.floats(0, 1), count=st.integers(1, 3), found_inf=st.sampled_from([None, 0.0, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_the_op_is_torchs_formula(decay: float, count: int, found_inf: float | None, dtype: torch.dtype) -> None:
    """And on a list, in place, to the last bit; the first average is the parameter, whatever was there."""
    torch.manual_seed(count)
    averages, params = ([torch.randn(shape).to(dtype) for shape in ((4, 3), (), (0,), (5,))] for _ in range(2))
    if count == 1 and not found_inf:
        averages[0].fill_(float("nan"))
    told, flag = torch.tensor(count), None if found_inf is None else torch.tensor(found_inf)
    made = [AVERAGED(average, param, told, flag, decay=decay) for average, param in zip(averages, params, strict=True)]
    wanted = [average.clone() for average in averages]
    if not found_inf and count == 1:
        wanted = params
    elif not found_inf:
        get_ema_multi_avg_fn(decay)(wanted, params, count)
    IN_PLACE[AVERAGED](averages, params, [], told, flag, decay=decay)
    for own, average, other in zip(made, averages, wanted, strict=True):
        assert own.dtype == dtype and own.equal(other) and average.equal(other)


def test_the_op_is_done_in_pieces() -> None:
    for count in (1, 2):
        prove(AVERAGED, (torch.randn(4, 6), torch.randn(4, 6), torch.tensor(count), torch.tensor(0.0)), {"decay": 0.9})


def test_the_program() -> None:
    """Split over dp, read behind the optimizer's op, and counted; on a rank one call for all, over the old averages."""
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), "ddp")
    x = torch.randn(4, 8)
    program = parallel.train_step(adamw(parallel), zero=1, ema=DECAY, amp="fp16-O2").capture(x, x)
    text = str(program.update)
    for line in (
        "  up_weight_ema : f32[16/dp 8] = state(up_weight_ema_next, "
        "'up.weight.ema')", "  averages : i64[] = state(averages_next, '.averages')",
        "  averages_next : i64[] = autopar::counted(averages, found_inf)",
        "  up_weight_ema_next : f32[16/dp 8] = autopar::averaged(up_weight_ema, up_weight_next, averages_next, "
        "found_inf, decay=0.9)",
    ):  # fmt: skip
        assert line in text, line
    assert "ema" not in str(program.micro) and type(program).parse(str(program)) == program
    parallel = autopar.parallelize(Pair(), Mesh(dp=1), "ddp")
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), ema=DECAY)
    step(x, x)
    (graph,) = [
        (functions := program.functions).lowered(functions.nodes_of("whole"), False).graph
        for _, program in step._here._programs.values()
        if ".averages" in program.names.values()
    ]
    called = [node.target for node in graph.nodes if node.target in IN_PLACE.values()]
    assert len(called) == 2 and called[1] is IN_PLACE[AVERAGED]
    before = {name: average.data_ptr() for name, average in step.ema.items()}
    step(x, x)
    assert before == {name: average.data_ptr() for name, average in step.ema.items()}


# -- what overflows --------------------------------------------------------------------------------------------------


def test_a_step_that_overflows_is_not_averaged() -> None:
    """The first two steps overflow, and the last but two; averages are of the float32 masters, in float32."""
    torch.manual_seed(0)
    make, batches, plan = steps.MODELS["mlp"]
    parallel = autopar.parallelize(make().float(), Mesh(dp=2, tp=2), plan)
    scaling = autopar.plan.loss_scaling.LossScaling(initial=2.0**30, growth=2.0**8, backoff=2.0**-8, interval=3)
    step = parallel.train_step(adamw(parallel), amp="fp16-O2", loss_scale=scaling, zero=1, microbatches=2, ema=DECAY)
    own, skipped = Reads(step), []
    for k in range(8):
        run(step, narrow(batches(k)), promoted=False)
        skipped.append(bool(step.skipped))
        if not skipped[-1]:
            own.update()
        own.check()
    assert skipped == [True, True, False, False, False, True, False, False] and int(step.averages.count) == 5
    assert {average.dtype for average in step.ema.values()} == {torch.float32}


# -- reading them ----------------------------------------------------------------------------------------------------


def evaluated(sizes: dict[str, int], zero: int) -> None:
    """Inside of the block the model computes with the averages, outside with its weights, which are the same objects
    and bits; so it is where the block fails. Then training goes on as if nothing had been."""
    torch.manual_seed(0)
    make, batches, plan = steps.MODELS["mlp"]
    model = make()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else "ddp")
    step, single = parallel.train_step(adamw(parallel), ema=DECAY, zero=zero), Single(alone, adamw(alone))
    wanted = averaged(alone)
    for k in range(4):
        run(step, batches(k)), single(**batches(k)), wanted.update_parameters(alone)
        if not k:
            continue  # the first average is the weight
        before = {name: (parameter, loops.whole(parameter).clone()) for name, parameter in parallel.named_parameters()}
        x = batches(9)
        with pytest.raises(KeyError), step.averaged():
            with torch.no_grad():
                call = parallel.simulate if parallel.job is None else parallel
                assert relative(call(**x), wanted.module(**x)) <= 1e-9 < relative(call(**x), alone(**x))
            for refused in (partial(run, step, x), step.averaged().__enter__, step.state_dict):
                with pytest.raises(
                    RuntimeError,
                    match=r"the model has the averages of its weights: leave the block of step.averaged\(\) first",
                ):
                    refused()
            raise KeyError
        for name, parameter in parallel.named_parameters():
            assert parameter is before[name][0] and torch.equal(loops.whole(parameter), before[name][1])
    assert max(steps.differences(step, single).values()) <= 1e-9


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 3])
def test_evaluation(zero: int) -> None:
    evaluated({"dp": 2, "tp": 2}, zero)


def frozen_later(sizes: dict[str, int]) -> None:
    """What is frozen moves on towards the weight, also in a step that has loaded it, and when it is trained again."""
    step = made(sizes, zero=1)
    reads = Reads(step)
    for k in range(3):
        run(step, pairs(k)), reads.update()
    step.parallel.up.requires_grad_(False)
    run(step, pairs(3)), reads.update()
    state, before = step.state_dict(), {name: loops.whole(value).clone() for name, value in step.ema.items()}
    up = loops.whole(step.parallel.up.weight).clone()
    assert relative(before["up.weight"], up) > 1e-9 and step.ema["up.weight"] is state["ema"]["weights"]["up.weight"]
    reads.check()
    with step.averaged():
        assert torch.equal(loops.whole(step.parallel.up.weight), before["up.weight"])
    other = made(sizes)
    other.parallel.up.requires_grad_(False)
    other.load_state_dict(copy.deepcopy(state) if step.parallel.job is None else state)
    run(other, pairs(4)), run(step, pairs(4)), reads.update()
    reads.check()
    for one in (step, other):
        assert relative(loops.whole(one.ema["up.weight"]), before["up.weight"].lerp(up, 1 - DECAY)) <= 1e-12
        assert int(one.averages.count) == 5
    step.parallel.up.requires_grad_(True)
    run(step, pairs(5)), reads.update()
    reads.check()


def test_frozen_later() -> None:
    frozen_later({"dp": 2})


def test_what_the_optimizer_does_not_have() -> None:
    """It is its own average, without memory, also before the first step."""
    parallel = autopar.parallelize(Pair().double(), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.AdamW(parallel.down.parameters()), ema=DECAY)
    parameters = dict(parallel.named_parameters())
    assert {name: average.data_ptr() for name, average in step.ema.items()} == {
        name: parameter.data_ptr() for name, parameter in parameters.items()
    }
    run(step, pairs(0)), run(step, pairs(1))
    assert step.ema["up.weight"].data_ptr() == parameters["up.weight"].data_ptr()
    assert not step.ema["up.weight"].requires_grad and not torch.equal(step.ema["down.weight"], parallel.down.weight)
    assert step.state_dict()["ema"]["weights"].keys() == {"down.weight", "down.bias"}


def test_without_averages() -> None:
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), "ddp")
    step = parallel.train_step(adamw(parallel))
    assert step.ema is None and "ema" not in step.state_dict()
    with pytest.raises(
        RuntimeError,
        match=re.escape("the step keeps no averages of its weights; give train_step their decay, as in ema=0.999"),
    ):
        step.averaged()


@pytest.mark.parametrize("decay", [1.5, -0.1, float("nan"), "x", True])
def test_no_decay(decay: Any) -> None:
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), "ddp")
    with pytest.raises(ValueError) as caught:
        parallel.train_step(adamw(parallel), ema=decay)
    assert (
        str(caught.value)
        == f"ema={decay!r} is no decay of a moving average: give a number from 0 to 1, such as 0.999, or None"
    )


def test_their_memory() -> None:
    """As much as the parameters' pieces that the optimizer's state has, and a count."""
    held = {}
    for ema in (None, DECAY):
        parallel = autopar.parallelize(Pair(), Mesh(dp=2), "ddp")
        step = parallel.train_step(adamw(parallel), zero=1, ema=ema)
        step.capture(torch.randn(4, 8), torch.randn(4, 8))
        held[ema] = step.memory()
    local = [record_of(node) for node in step.local(0)["last"].placeholders]
    moments = sum(size(record.type) for record in local if record.name.endswith(".exp_avg"))
    assert held[DECAY].held - held[None].held == moments + 8 and moments == 4 * (16 * 8 * 2 + 16 + 8) // 2
    kinds = [one.phase("update").kinds["optimizer state"] for one in held.values()]
    assert kinds[1] - kinds[0] == moments + 8


# -- going on --------------------------------------------------------------------------------------------------------


def made(sizes: dict[str, int], **options: Any) -> Any:
    torch.manual_seed(0)
    model = Pair().double()
    parallel = autopar.parallelize(model, Mesh(sizes), preset_of(sizes))
    return parallel.train_step(adamw(parallel), ema=DECAY, **options)


def pairs(k: int) -> dict[str, torch.Tensor]:
    return {**steps.vectors(k), "y": steps.vectors(k + 9)["x"]}


def numbers(step: Any) -> dict[str, torch.Tensor]:
    return {name: loops.whole(average).clone() for name, average in step.ema.items()}


def goes_on(folder: str, sizes: dict[str, int], zero: int) -> dict[str, torch.Tensor]:
    """Load on another mesh, take two steps: the averages."""
    step = made(sizes, zero=zero)
    step.capture(pairs(0))
    with torch.no_grad():
        for parameter in step.parallel.parameters():
            parameter.zero_()
    step.load_state_dict(checkpoint.load(folder, step.state_dict()))
    assert int(step.averages.count) == 3
    for k in (3, 4):
        run(step, pairs(k))
    return numbers(step)


@pytest.mark.processes
def test_another_mesh_and_stage_goes_on(tmp_path: Any) -> None:
    step = made({"dp": 2, "tp": 2}, zero=1)
    for k in range(3):
        run(step, pairs(k))
    folder = str(tmp_path)
    checkpoint.save(folder, step.state_dict())
    for k in (3, 4):
        run(step, pairs(k))
    wanted = numbers(step)
    for found in (
        goes_on(folder, {"dp": 4}, 3),
        *ranks(2).run(goes_on, folder, {"dp": 2}, 2),
        *ranks(2).run(goes_on, folder, {"dp": 2}, 0),
    ):
        assert found.keys() == wanted.keys() and all(
            relative(found[name], average) <= 1e-12 for name, average in wanted.items()
        )


def loaded() -> None:
    """Full tensors, DTensors of another stage, and none: those begin as the weights. What is given is not written to
    afterwards."""
    first = made({"dp": 2}, zero=1)
    run(first, pairs(0)), run(first, pairs(1))
    state, wanted = first.state_dict(), numbers(first)
    whole = {**state, "ema": {"count": 2, "weights": wanted}}
    for given_, zero in ((state, 0), (whole, 1), (whole, 3)):
        step = made({"dp": 2}, zero=zero)
        step.load_state_dict(given_)
        assert (
            all(torch.equal(loops.whole(average), wanted[name]) for name, average in step.ema.items())
            and int(step.averages.count) == 2
        )
        before = {name: average.clone() for name, average in wanted.items()}
        run(step, pairs(2))
        assert all(torch.equal(before[name], wanted[name]) for name in before)
        assert all(torch.equal(loops.whole(average), wanted[name]) for name, average in first.ema.items())
    step = made({"dp": 2}, zero=1)
    step.load_state_dict({**state, "ema": {"count": 2, "weights": {}}})
    assert not step.averages.tensors
    begin = {name: loops.whole(parameter).clone() for name, parameter in step.parallel.named_parameters()}
    run(step, pairs(2))
    for name, parameter in step.parallel.named_parameters():
        assert relative(loops.whole(step.ema[name]), begin[name].lerp(loops.whole(parameter), 1 - DECAY)) <= 1e-12


@pytest.mark.processes
def test_loaded() -> None:
    loaded()
    ranks(2).run(loaded)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (
        lambda state: state.pop("ema"),
        "the state of a step has no 'ema', the averages of its weights; save it of a step with ema=, or leave ema= "
        "out of this one",
    ),
    "without a count": (
        lambda state: state["ema"].pop("count"),
        "the state's 'ema' has no 'count', but 'weights'; save what step.state_dict() gives",
    ),
    "of another model": (
        lambda state: state["ema"]["weights"].update({"up.wieght": torch.ones(3)}),
        "the state's 'ema' has up.wieght, which is no parameter of the model",
    ),
    "of another shape": (
        lambda state: state["ema"]["weights"].update({"up.bias": torch.ones(3)}),
        "the state's 'ema' has up.bias of shape [3], and the parameter is [16]: it is of another model",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_states_that_are_refused(name: str) -> None:
    change, text = BROKEN[name]
    step = made({"dp": 2})
    run(step, pairs(0))
    state = step.state_dict()
    weights = {key: value * 0 for key, value in state["model"].items()}
    state = {**state, "model": weights, "ema": {**state["ema"], "weights": dict(state["ema"]["weights"])}}
    change(state)
    with pytest.raises(ValueError) as caught:
        step.load_state_dict(state)
    assert str(caught.value) == text and all(parameter.any() for parameter in step.parallel.parameters()), (
        "nothing is changed"
    )
