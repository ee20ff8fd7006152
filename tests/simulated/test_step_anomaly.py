"""Steps that look for NaN: the first op that makes one is told with its line, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import steps
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from presets import preset_of
from processes import ranks
from torch import distributed, nn

import autopar
from autopar import Mesh
from autopar.errors import AnomalyError, LaunchError
from autopar.runtime import anomaly
from autopar.runtime.processes.launch import launch

SIZES = {"dp": 2, "tp": 2}
Activation = Callable[[torch.Tensor], torch.Tensor]


class Pair(nn.Module):
    """Two layers with an activation of the test's, and a buffer that is added."""

    def __init__(self, activation: Activation = torch.relu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(8, 16), nn.Linear(16, 8), activation
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.activation(self.up(x))) + self.shift).square().mean()


def logarithm(x: torch.Tensor) -> torch.Tensor:
    return torch.log(x - 10)


def root_of_square(x: torch.Tensor) -> torch.Tensor:
    """Its gradient at 0 is 0 * inf."""
    return torch.sqrt(torch.relu(x).square())


def masked(x: torch.Tensor) -> torch.Tensor:
    """-inf on the way, and no NaN."""
    return x.masked_fill(x > x.mean(-1, keepdim=True) + 0.1, -torch.inf).softmax(-1)


def made(
    activation: Activation = torch.relu,
    optimizer: Any = steps.adamw,
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(Pair(activation), Mesh(sizes or SIZES), preset_of(sizes or SIZES))
    return parallel.train_step(optimizer(parallel), **{"detect_anomaly": True, **options})


def batch(rows: int = 8) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 8)


def spoiled(x: torch.Tensor) -> torch.Tensor:
    x[5, 3] = torch.nan
    return x


def write(step: Any, of: str, value: float) -> None:
    """Into the first row of a parameter, of a state of it, or of the buffer."""
    name, _, state = of.partition(":")
    tensor = step.parallel.get_parameter(name) if name != "shift" else step.parallel.get_buffer(name)
    (step.optimizer.state[tensor][state] if state else tensor.data)[0] = value


# what goes wrong → the step; what is done to it after one step; the batch; what is told, with R where a rank is named
# if it has pieces
CASES: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None, Callable[[], torch.Tensor], str]] = {
    "an op of the forward": (
        {"activation": logarithm, "microbatches": 2},
        None,
        batch,
        r"log makes a NaN on rank 0, in the forward of micro-batch 1 of 2\n    log : f32\[\d 16\] = log\(sub\)\n    "
        r"test_step_anomaly\.py:\d+  return torch\.log\(x - 10\)   in module the root\n  (\d+) of \1 elements of log "
        r"are NaN; none of its operands has one:\n    sub from -1[\d.]+ to -[\d.]+, no inf\n  keep the operands where "
        r"the op is defined, as with clamp or an epsilon; ",
    ),
    "an op of the backward": (
        {"activation": root_of_square},
        None,
        batch,
        r"mul\.Tensor makes a NaN on rank 0, in the backward\n.*\n    test_step_anomaly\.py:\d+  return "
        r"torch\.sqrt\(torch\.relu\(x\)\.square\(\)\)   in module the root\n.*\n    div_\d from .*, [1-9]\d* inf\n    "
        r"mul_\d from 0 to .*, no inf\n",
    ),
    "the update": (
        {"microbatches": 2},
        lambda step: write(step, "down.bias:exp_avg_sq", -1.0),
        batch,
        r"autopar::adamw of down\.bias makes a NaN on rank 0, in the update\n    adamw\w* : .* = "
        r"autopar::adamw\(down_bias, .*\n    update by AdamW   in module down\n  "
        r"1 of 8 elements of .* are NaN; none of its operands has one:\n    "
        r"down\.bias (from .*, no inf|was overwritten)\n",
    ),
    "the input": (
        {},
        None,
        lambda: spoiled(batch()),
        r"the input xR comes in with NaN: 1 of 64 elements\n  look at how the batch is made; ",
    ),
    "the input of a micro-batch": (
        {"microbatches": 2},
        None,
        lambda: spoiled(batch()),
        r"the input x of micro-batch 2 of 2R comes in with NaN: 1 of 32 elements\n",
    ),
    "a parameter": (
        {},
        lambda step: write(step, "up.weight", torch.nan),
        batch,
        r"the parameter up\.weightR comes in with NaN: 8 of 128 elements\n  its initialisation, a checkpoint or an "
        r"earlier step left it there; ",
    ),
    "a buffer": (
        {},
        lambda step: write(step, "shift", torch.nan),
        batch,
        r"the buffer shiftR comes in with NaN: 1 of 8 elements\n",
    ),
    "the optimizer's state": (
        {},
        lambda step: write(step, "up.weight:exp_avg", torch.nan),
        batch,
        r"the state up\.weight\.exp_avgR comes in with NaN: 8 of 128 elements\n",
    ),
    "a constant": (
        {"activation": lambda x: x + torch.tensor([torch.nan] * 16)},
        None,
        batch,
        r"the constant _tensor_constant0 makes a NaN on rank 0, in the forward\n    _tensor_constant0 : f32\[16\] = "
        r"constant\(.*\n",
    ),
    "a cast of too much": (
        {"amp": "fp16-O2", "loss_scale": 8.0},
        None,
        lambda: batch() * 1e5,
        r"addmm makes a NaN on rank 0, in the forward\n(.*\n)*    x_float16 from .*, [1-9]\d* inf\n",
    ),
}


@pytest.mark.parametrize("called", [False, True], ids=["simulated", "called"])
@pytest.mark.parametrize("name", CASES)
def test_what_makes_a_nan_is_told(name: str, called: bool) -> None:
    options, change, data, told = CASES[name]
    step = made(sizes={"dp": 1} if called else SIZES, **options)
    run = step if called else step.simulate
    if change is not None:
        run(batch())
        change(step)
    with pytest.raises(AnomalyError) as caught:
        run(data())
    assert re.match(told.replace("R", " on rank 0" if called else ""), str(caught.value)), caught.value
    assert isinstance(caught.value, RuntimeError), "as torch's detect_anomaly"
    assert not torch.is_anomaly_enabled()


OVERFLOW: dict[str, Any] = {"loss_scale": 2.0**40, "clip_norm": 1.0, "microbatches": 2}
QUIET: dict[str, dict[str, Any]] = {
    "relu": {},
    "a mask": {"activation": masked},
    "a mask of NaN": {"activation": lambda x: torch.where(x > 0, torch.log(x), 0)},
    "a norm of zeros": {
        "activation": lambda x: nn.functional.normalize(
            torch.cat([x[:, :8], x[:, 8:] * 0], 1).unflatten(1, (2, 8)), dim=-1
        ).flatten(1)
    },
    "an overflow of fp16-O1": {"amp": "fp16-O1", **OVERFLOW},
    "an overflow of fp16-O2": {"amp": "fp16-O2", **OVERFLOW},
    "an optimizer in plain ops": {
        "amp": "fp16-O2",
        **OVERFLOW,
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.5),
    },
}


SAME = pytest.mark.sweep("what looks is the same for both, and the other way runs another case of its kind")


@pytest.mark.parametrize(("name", "called"), [
    ("relu", False), ("a mask", True), ("a mask of NaN", False), ("a norm of zeros", True),
    ("an overflow of fp16-O1", False), ("an overflow of fp16-O2", True), ("an optimizer in plain ops", False),
    *(pytest.param(*case, marks=SAME) for case in [
        ("relu", True), ("a mask", False), ("a mask of NaN", True), ("a norm of zeros", False),
        ("an overflow of fp16-O1", True), ("an overflow of fp16-O2", False), ("an optimizer in plain ops", True),
    ]),
])  # fmt: skip
def test_what_is_no_anomaly(name: str, called: bool) -> None:
    """And a step that looks computes the same, bit for bit."""
    both = [made(sizes={"dp": 1} if called else SIZES, detect_anomaly=looks, **QUIET[name]) for looks in (True, False)]
    for _ in range(2):
        a, b = (step(batch()) if called else step.simulate(batch()) for step in both)
        assert torch.equal(a, b)
    for a, b in zip(*(step.parallel.parameters() for step in both), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
    assert bool(both[0].skipped) == ("amp" in QUIET[name])


def test_a_nan_of_finite_operands_is_told_under_a_scale() -> None:
    """Where gradients may overflow: the backward of the root of 0 divides by 0, and a NaN of inf is none; 0 / 0 is
    one."""
    zero_by_zero = lambda x: ZeroByZero.apply(x)  # noqa: E731
    with pytest.raises(AnomalyError, match=r"^div\.Tensor makes a NaN on rank 0, in the backward\n"):
        made(zero_by_zero, amp="fp16-O1", loss_scale=8.0).simulate(batch())
    made(root_of_square, amp="fp16-O1", loss_scale=8.0).simulate(batch())


class ZeroByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        zero = gradient - gradient
        return zero / zero


# -- when it looks -----------------------------------------------------------------------------------------------------


def code_of(lowered: Any) -> str:
    return lowered.graph.python_code("self").src


def test_who_does_not_look_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of a plain step is what it was, and one that looks is that with a line more behind each op."""
    step = made(sizes={"dp": 1}, detect_anomaly=False, clip_norm=1.0)
    monkeypatch.setattr(anomaly, "has_nan", lambda x: pytest.fail("looked"))
    step(batch())
    monkeypatch.undo()
    runs = [program.functions for _, program in step._here._programs.values() if program.functions._made]
    plain = [{key: code_of(one.lowered) for key, one in run._made.items()} for run in runs]
    assert len(plain) == 1 and "look" not in str(plain)
    with torch.autograd.set_detect_anomaly(True):
        step(batch())
    for before, run in zip(plain, runs, strict=True):
        assert {key: code_of(run._made[key].lowered) for key in before} == before
        ((key, looking),) = [(key, one.lowered) for key, one in run._made.items() if key not in before]
        lines = [re.sub(r";  .*", "", line) for line in code_of(looking).splitlines()]
        (same,) = before.values()
        assert [line for line in lines if "anomaly_look" not in line][1:] == [
            re.sub(r";  .*", "", line) for line in same.splitlines()
        ][1:]
        ops = sum(" = torch.ops." in line for line in lines)
        looks = sum("anomaly_look" in line for line in lines)
        assert ops and looks >= ops and len(lines) == len(same.splitlines()) + looks, key


@pytest.mark.parametrize(("mode", "looks"), [
    (torch.autograd.detect_anomaly, True), (lambda: torch.autograd.set_detect_anomaly(True), True),
    (lambda: torch.autograd.set_detect_anomaly(True, check_nan=False), False), (contextlib.nullcontext, False),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_torchs_own_mode(mode: Any, looks: bool) -> None:
    step = made(logarithm, detect_anomaly=False)
    with pytest.raises(AnomalyError) if looks else contextlib.nullcontext(), mode():
        assert step.simulate(batch()).isnan()


@pytest.mark.parametrize("called", [False, True], ids=["simulated", "called"])
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_outside_of_a_step(called: bool) -> None:
    """``parallel(...)`` under torch's mode: its forward, and its backward."""
    for activation, told in (
        (logarithm, "^log makes a NaN on rank 0, in the forward\n"),
        (root_of_square, "makes a NaN on rank 0, in the backward\n"),
    ):
        parallel = autopar.parallelize(Pair(activation), Mesh({"dp": 1} if called else SIZES))
        with pytest.raises(AnomalyError, match=told), torch.autograd.set_detect_anomaly(True):
            (parallel if called else parallel.simulate)(batch()).backward()
    parallel = autopar.parallelize(Pair(), Mesh({"dp": 1} if called else SIZES))
    with torch.autograd.set_detect_anomaly(True):
        (parallel if called else parallel.simulate)(batch()).backward()
        out = (parallel if called else parallel.simulate)(batch() * torch.nan)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parallel.parameters())
    assert out.isnan(), "what comes in with one is made by no op"


# -- the first one -----------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Activation] = {
    "sqrt": lambda x: x.sqrt(),
    "log": lambda x: x.log(),
    "acos": lambda x: x.acos(),
    "exp": lambda x: (20 * x).exp(),
    "over": lambda x: x / x.relu(),
    "less": lambda x: x.exp().exp() - x.exp().exp(),
    "tanh": lambda x: x.tanh(),
    "up": lambda x: x + 2.0,
}  # fmt: skip


class Chain(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.weight, self.names = nn.Parameter(torch.ones(4, dtype=torch.float64)), names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for name in self.names:
            x = FUNCTIONS[name](x)
        return x.mean()


def first_nan(names: list[str], x: torch.Tensor) -> str | None:
    for name in names:
        x = FUNCTIONS[name](x)
        if x.isnan().any():
            return name
    return None


def torch_finds_one(model: nn.Module, x: torch.Tensor) -> bool:
    with torch.autograd.set_detect_anomaly(True):
        try:
            model(x).backward()
        except RuntimeError:
            return True
    return False


@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=3),
    st.integers(0, 99),
    st.lists(st.booleans(), min_size=2, max_size=2),
)
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_it_is_the_first_of_the_first_rank(names: list[str], seed: int, wild: list[bool]) -> None:
    """Beside eager, on rows of a rank from 0 to 1, or wild ones: each rank runs to the end before the next one does; a
    backward has a NaN where torch finds one."""
    torch.manual_seed(seed)
    x = torch.cat(
        [3 * torch.randn(2, 4, dtype=torch.float64) if some else torch.rand(2, 4, dtype=torch.float64) for some in wild]
    )
    parallel = autopar.parallelize(Chain(names), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), detect_anomaly=True)
    pieces = [first_nan(names, piece) is not None or torch_finds_one(Chain(names), piece) for piece in x.chunk(2)]
    if not any(pieces):
        step.simulate(x)
        return
    rank = pieces.index(True)
    name = first_nan(names, x.chunk(2)[rank])
    with pytest.raises(AnomalyError) as caught:
        step.simulate(x)
    first, _, source, *_ = str(caught.value).splitlines()
    assert first.endswith(f" makes a NaN on rank {rank}, in the {'forward' if name else 'backward'}")
    if name:
        assert f'"{name}": lambda' in source


# -- several ranks -----------------------------------------------------------------------------------------------------


class Total(nn.Module):
    """A sum over ranks: of the loss, in the update, or within the forward."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.weight, self.phase = nn.Parameter(torch.ones(2)), phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (x * self.weight).sum()
        return total if self.phase == "update" else total.tanh()


CAME = (
    r"all_reduce makes a NaN on rank {rank}, in the {phase}\n    .* = all_reduce\(.*, dp\)\n(    "
    r"test_step_anomaly.*\n)?"
    r"  .* are NaN; this rank's piece has none, so it came over dp from rank {other}:\n    .*inf\n  look at the "
    r"errors of those ranks; "
)


def infinities(phase: str, called: bool = True) -> None:
    """The sum over ranks of inf and -inf."""
    parallel = autopar.parallelize(Total(phase), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), detect_anomaly=True)
    x = torch.tensor([[3e38, 3e38], [-3e38, -3e38]])
    rank = distributed.get_rank() if called else 0
    place = "(backward|update)" if phase == "update" else phase  # a schedule may start it before
    for _ in range(2):
        with pytest.raises(AnomalyError) as caught:
            (step if called else step.simulate)(x)
        assert re.match(CAME.format(rank=rank, other=1 - rank, phase=place), str(caught.value)), caught.value
    assert (step if called else step.simulate)(x / x).isfinite()


@pytest.mark.processes
@pytest.mark.parametrize("phase", ["forward", "update"])
def test_what_came_from_another_rank(phase: str) -> None:
    infinities(phase, called=False)
    ranks(2).run(infinities, phase)


def everywhere() -> None:
    """Each rank tells of itself; micro-batches, two axes, and then a step that is well."""
    step = made(logarithm, microbatches=2, zero=1)
    with pytest.raises(
        AnomalyError, match=f"^log makes a NaN on rank {distributed.get_rank()}, in the forward of micro-batch 1 of 2\n"
    ):
        step(batch())
    with torch.no_grad():
        step.parallel.up.bias.add_(100.0)
    assert step(batch()).isfinite()


@pytest.mark.processes
def test_on_processes() -> None:
    ranks(4).run(everywhere)


@pytest.mark.processes
@pytest.mark.sweep("test_what_came_from_another_rank finds it, and test_launch tells of a failed step once")
def test_one_rank_finds_it_and_all_end(capfd: pytest.CaptureFixture[str]) -> None:
    program = """
        import torch, autopar
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten())
        class Loss(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model
            def forward(self, x):
                return torch.sqrt(self.inner(x)[:, 0]).sum()
        torch.nn.init.ones_(model[0].weight)
        parallel = autopar.parallelize(Loss(), autopar.Mesh(dp=2))
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.0), detect_anomaly=True)
        x = torch.ones(4, 4)
        step(x)
        x[3] = -1.0
        step(x)
    """
    with pytest.raises(LaunchError) as error:
        launch([sys.executable, "-c", textwrap.dedent(program)], 2)
    assert re.match(
        r"autopar: rank 1 failed in sum_1 : f32\[\] = sum\(sqrt.*: AnomalyError: sqrt makes a NaN on rank 1, in the "
        r"forward",
        str(error.value),
    )
    assert error.value.rank == 1
    told = capfd.readouterr().err
    assert (
        "[rank 1] autopar.errors.AnomalyError: sqrt makes a NaN on rank 1" in told
        and "1 of 2 elements of sqrt are NaN" in told
    )
