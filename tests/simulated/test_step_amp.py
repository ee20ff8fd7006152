"""Whole steps in mixed precision: no further from float32 than a single device's own mixed precision, and overflows
that change nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import calls_of_steps
import pytest
import steps
import torch
from equality import relative
from processes import ranks
from steps import Pair
from threads import one_thread  # noqa: F401  # a fixture of all tests here
from torch import nn

import autopar
from autopar import Mesh
from autopar.errors import OverflowingError, PrecisionError
from autopar.plan.loss_scaling import LossScaling

OPTIONS: dict[str, Any] = {"microbatches": 2, "clip_norm": 0.5}
CASES = [
    ("mlp", {"dp": 2, "tp": 2}, "bf16-O1", 1), ("mlp", {"dp": 2, "tp": 2}, "bf16-O2", 3),
    ("mlp", {"dp": 4}, "fp16-O1", 2), ("llama sequence", {"dp": 2, "tp": 2}, "fp16-O2", 1),
]  # fmt: skip
MORE = [
    ("gpt2", {"dp": 4}, "bf16-O1", 0),
    ("mlp", {"dp": 4}, "fp16-O2", 1), ("llama", {"dp": 2, "tp": 2}, "bf16-O1", 3),
    ("gpt2", {"dp": 2, "tp": 2}, "fp16-O1", 3),
    ("llama", {"dp": 4}, "bf16-O2", 2), ("llama", {"dp": 2, "tp": 2}, "fp16-O1", 0),
    ("gpt2", {"dp": 2, "tp": 2}, "bf16-O2", 1), ("gpt2", {"dp": 2, "tp": 2}, "fp16-O2", 2),
]  # fmt: skip
ON_PROCESSES = [
    ("mlp", {"dp": 2, "tp": 2}, "fp16-O2", 3), ("mlp", {"dp": 4}, "fp16-O1", 2),
    ("mlp", {"dp": 2, "tp": 2}, "bf16-O2", 1),
    *(
        pytest.param(*case, marks=pytest.mark.sweep("mlp runs in this mode, and test_step_whole runs llama in fp16-O2"))
        for case in [
            ("llama", {"dp": 2, "tp": 2}, "bf16-O2", 1), ("llama", {"dp": 2, "tp": 2}, "fp16-O1", 2),
            ("gpt2", {"dp": 4}, "fp16-O2", 1),
        ]
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sizes", "amp", "zero"),
    [
        *CASES,
        *(
            pytest.param(*case, marks=pytest.mark.sweep("its model and its mode occur in CASES, or on processes"))
            for case in MORE
        ),
    ],
    ids=str,
)
def test_five_steps(name: str, sizes: dict[str, int], amp: str, zero: int) -> None:
    steps.mixed_alike(name, sizes, amp, {**OPTIONS, "zero": zero})


@pytest.mark.processes
@pytest.mark.parametrize(("name", "sizes", "amp", "zero"), ON_PROCESSES, ids=str)
def test_steps_on_processes(name: str, sizes: dict[str, int], amp: str, zero: int) -> None:
    ranks(4).run(steps.mixed_alike, name, sizes, amp, {**OPTIONS, "zero": zero}, steps.sgd, 2.0, 3)


@pytest.mark.long
def test_adamw_in_mixed_precision() -> None:
    """Its first steps go by the signs of gradients, also of those that are noise; so only losses and norms are
    close."""
    steps.mixed_alike("llama", {"dp": 2, "tp": 2}, "bf16-O2", {**OPTIONS, "zero": 1}, steps.adamw, parameters=4.0)


PLAN = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}


def made(model: nn.Module | None = None, **options: Any) -> Any:
    parallel = autopar.parallelize(model or Pair(), Mesh(dp=2, tp=2), PLAN)
    return parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9), **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randn(8, 8)


# -- overflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("amp", "zero"), [("fp16-O1", 0), ("fp16-O2", 1), ("fp16-O2", 3)])
def test_overflow(amp: str, zero: int) -> None:
    """Scales, and the steps that are skipped, are those of torch's GradScaler; what is skipped changes nothing."""
    steps.overflows_alike({"dp": 2, "tp": 2}, amp, zero)


@pytest.mark.processes
def test_overflow_on_processes() -> None:
    ranks(4).run(steps.overflows_alike, {"dp": 2, "tp": 2}, "fp16-O2", 2)


@pytest.mark.processes
def test_one_rank_overflows() -> None:
    """Only the last row is too large, so that one piece of the batch alone has inf in its gradients: no rank takes the
    step."""
    ranks(4).run(calls_of_steps.one_rank_overflows)


def test_one_infinite_gradient() -> None:
    """And no nan: the sum over rows that is the gradient of the last bias, in one column."""
    step = made(amp="fp16-O2", loss_scale=2.0**16)
    x, y = batch()
    y[:, 0] = -15.0  # times 2 / 64 and the scale: 30 720 in each of four rows
    with torch.no_grad():
        for p in (step.parallel.up.bias, step.parallel.down.weight):  # all other gradients are finite
            p.zero_()
    before = [p.clone() for p in step.parallel.parameters()]
    step.simulate(torch.zeros_like(x), y)
    assert float(step.skipped) == 1 and all(
        torch.equal(a, b) for a, b in zip(before, step.parallel.parameters(), strict=True)
    )


def test_a_scale_that_underflows() -> None:
    step = made(amp="fp16-O2", loss_scale=LossScaling(initial=4.0, minimum=1.0), microbatches=2)
    x, y = batch()
    before = [p.clone() for p in step.parallel.parameters()]
    x[0, 0] = float("nan")
    for scale in (2.0, 1.0):
        step.simulate(x, y)
        assert float(step.skipped) == 1 and float(step.scaler[0]) == scale
    with pytest.raises(
        OverflowingError,
        match=r"the loss scale has fallen to 0\.5, below 1: gradients overflow at every scale\n  look for inf or nan "
        r"in the loss or the data; amp=\"bf16-O1\" has",
    ):
        step.simulate(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, step.parallel.parameters(), strict=True))


def test_without_fp16_there_is_no_scale() -> None:
    """bf16 has the range of float32."""
    step = made(amp="bf16-O2")
    step.simulate(*batch())
    assert step.scaler is None and step.skipped is None and ".scale" not in str(step.program)


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_the_norm_is_unscaled(scale: float) -> None:
    """Powers of two change nothing, but what they save from being too small."""
    x, y = batch()
    model = Pair()
    alone = copy.deepcopy(model)
    step = made(model, amp="fp16-O2", loss_scale=scale, clip_norm=0.01)
    step.simulate(x, y)
    alone(x, y).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert relative(step.grad_norm, norm) <= 2e-3
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), alone.parameters(), strict=True)]).norm()
    assert moved <= 2e-3 * 0.1 * 0.01, "a step of length lr · clip_norm, whatever the scale"


# -- copies ------------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda parallel: parallel.load_state_dict(
        {name: t * 0.5 for name, t in parallel.state_dict().items()}
    ),
    "init": lambda parallel: [nn.init.normal_(p) for p in parallel.parameters()],
    "in place": lambda parallel: [p.detach().mul_(-1) for p in parallel.parameters()],
    "one of them": lambda parallel: nn.init.ones_(parallel.down.bias),
    "another tensor": lambda parallel: [setattr(p, "data", torch.full_like(p, 0.1)) for p in parallel.parameters()],
    "data": lambda parallel: [p.data.mul_(-1) for p in parallel.parameters()],
    "an optimizer's step": lambda parallel: torch.optim.SGD(_with_gradients(parallel), lr=1.0).step(),
}


def _with_gradients(parallel: Any) -> list[nn.Parameter]:
    found = list(parallel.parameters())
    for p in found:
        p.grad = torch.ones_like(p)
    return found


@pytest.mark.parametrize("name", WRITES)
def test_writes_between_steps(name: str) -> None:
    """Whoever writes to a parameter between steps, the low-precision copies follow."""
    x, y = batch()
    step = made(amp="bf16-O2", microbatches=2)
    before = float(step.simulate(x, y))
    WRITES[name](step.parallel)
    with torch.no_grad():
        wanted = float(step.parallel.module(x, y))
    assert abs(wanted - before) > 0.05 * wanted
    assert float(step.simulate(x, y)) == pytest.approx(wanted, rel=0.02)


def test_parameters_keep_what_their_copies_round_off() -> None:
    """Forty updates, each too small for bf16, add up."""
    model = Pair()
    nn.init.ones_(model.down.bias)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), PLAN)
    step = parallel.train_step(torch.optim.SGD([model.down.bias], lr=1e-3), amp="bf16-O2", zero=1)
    x, y = batch()
    moved = []
    for _ in range(40):
        before = model.down.bias.detach().clone()
        step.simulate(x, y)
        moved.append(before - model.down.bias.detach())
    assert all((one.abs() < 2.0**-9).all() and one.any() for one in moved)
    assert torch.allclose(sum(moved), 1 - model.down.bias.detach(), atol=1e-6) and (sum(moved).abs() > 2.0**-8).any()


@pytest.mark.parametrize("amp", ["bf16-O1", "fp16-O2"])
def test_frozen_parameters(amp: str) -> None:
    """What is not trained, and what the optimizer does not have, is computed with in low precision all the same."""
    x, y = batch()
    for frozen in (True, False):
        model = Pair()
        parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), PLAN)
        parallel.up.requires_grad_(not frozen)
        before = model.up.weight.clone()
        step = parallel.train_step(torch.optim.SGD(parallel.down.parameters(), lr=0.1), amp=amp, zero=1)
        for _ in range(2):
            wanted = float(model(x, y).detach())
            assert float(step.simulate(x, y)) == pytest.approx(wanted, rel=0.01)
        assert torch.equal(before, model.up.weight) and model.up.weight.dtype == torch.float32


def test_a_model_in_low_precision() -> None:
    """Without ``amp`` it is what it is: no copies, and an update in the dtype of its parameters, as torch's own."""
    x, y = (tensor.bfloat16() for tensor in batch())
    model = Pair().bfloat16()
    alone = copy.deepcopy(model)
    step = made(model)
    assert float(step.simulate(x, y)) == pytest.approx(float(alone(x, y).detach()), rel=0.01)
    alone(x, y).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9).step()
    assert ".copy" not in str(step.program)
    assert all(
        relative(a.float(), b.float()) <= 0.01 for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )


# -- the program -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", ["bf16-O1", "bf16-O2", "fp16-O1", "fp16-O2"])
def test_reduce_dtype(amp: str) -> None:
    """Sums over ranks in float32: a cast to it before each reduction of low precision, and back behind it where that is
    used."""
    low = amp[:4].replace("fp", "f")
    reduced = {}
    for dtype in (None, torch.float32):
        text = made(amp=amp, reduce_dtype=dtype, zero=2).capture(*batch()).micro.text()
        reduced[dtype] = re.findall(r"(\w+) : (\w+)\[.* = (?:all_reduce|reduce_scatter)\((\w+),", text)
        assert reduced[dtype]
        if dtype is None:
            assert {kind for _, kind, _ in reduced[dtype]} == {low}
            continue
        for name, kind, operand in reduced[dtype]:
            assert kind == "f32" and re.search(rf"  {operand} : f32\[.* = _to_copy\(\w+, dtype=f32\)", text), (
                name,
                operand,
            )
        added = re.findall(r"_grad_sum : f32\[.* = add\.Tensor\(\w+, (\w+)\)", text)
        assert len(added) == 4 and all(f"  {value} : f32[" in text for value in added), (
            "no gradient is rounded again before it is added"
        )
    assert [name for name, _, _ in reduced[None]] != [] and len(reduced[None]) == len(reduced[torch.float32])


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("amp", ["bf16-O1", "bf16-O2", "fp16-O2"])
def test_a_sum_over_ranks_has_all_its_bits(amp: str, zero: int) -> None:
    """The addends of two ranks are numbers of low precision, and their sum is none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum()

    model = Model()
    nn.init.zeros_(model.linear.weight)
    x = torch.tensor([[1.0], [2.0**-12]]).expand(2, 4).clone()  # float16 holds 11 bits
    found, scale = {}, {"loss_scale": 1.0} if amp.startswith("fp16") else {}
    for dtype in (None, torch.float32):
        parallel = autopar.parallelize(copy.deepcopy(model), Mesh(dp=2), "ddp")
        step = parallel.train_step(
            torch.optim.SGD(parallel.parameters(), lr=1.0), amp=amp, zero=zero, reduce_dtype=dtype, **scale
        )
        step.simulate(x)
        (weight,) = parallel.parameters()
        found[dtype] = set(weight.flatten().tolist())
    assert found == {None: {-1.0}, torch.float32: {-1 - 2.0**-12}}


def test_an_op_without_a_kernel() -> None:
    """The op, the dtype, the device, the user's line, and what to do."""

    class Model(Pair):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.down(torch.special.log_ndtr(self.up(x))), y)

    with pytest.raises(PrecisionError) as caught:
        made(Model(), amp="fp16-O2").simulate(*batch())
    first, line, where, remedy = str(caught.value).splitlines()
    assert first == "aten::special_log_ndtr has no kernel for f16 on cpu" and line.strip().startswith(
        "special_log_ndtr : f32[8 16] = special_log_ndtr("
    )
    assert "test_step_amp.py:" in where and "torch.special.log_ndtr(self.up(x))" in where
    assert remedy == "  run it in float32: keep={'aten::special_log_ndtr': 'f32'}"
    step = made(Model(), amp="fp16-O2", keep={"aten::special_log_ndtr": "f32"}, loss_scale=1024)
    assert step.simulate(*batch()).isfinite()


@pytest.mark.parametrize("amp", ["bf16-O1", "fp16-O2"])
def test_a_model_in_float64(amp: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"amp='{amp}' is for a model and data in float32; the parameter up\.weight is f64\n  make it float32: "
        rf"model\.float\(\); or leave amp=None",
    ):
        made(Pair().double(), amp=amp).simulate(*(tensor.double() for tensor in batch()))


class Running(nn.Module):
    """Buffers that forward updates in place: a mean of activations, which it reads, a count in small steps, the last
    row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.ones(8))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.float().mean(0), alpha=0.1)
            self.seen.add_(1 / 512)
            self.last.copy_(h[-1])
        return self.down(h - self.mean).square().mean()


@pytest.mark.parametrize("amp", ["bf16-O1", "bf16-O2", "fp16-O2"])
def test_buffers_that_forward_updates_keep_their_dtype(amp: str) -> None:
    """As in a loop under ``torch.autocast`` on a single device: low precision would not see a count of 1/512 beside
    1."""
    torch.manual_seed(0)
    model = Running()
    alone, dtype = copy.deepcopy(model), torch.float16 if amp.startswith("fp16") else torch.bfloat16
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), PLAN)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), amp=amp)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(6, 8)
        found = step.simulate(x)
        with torch.autocast("cpu", dtype):
            loss = alone(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert relative(found.float(), loss.float()) <= 2e-2
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())
    assert torch.equal(model.seen, torch.full((8,), 1 + 4 / 512)) and torch.equal(alone.seen, model.seen)
    assert relative(model.mean, alone.mean) <= 2e-2 and relative(model.last, alone.last) <= 2e-2
