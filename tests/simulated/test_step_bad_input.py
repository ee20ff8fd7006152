"""Wrong input to a step: one clear error each, which names the offender and the remedy, and changes nothing; and what
may change."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import calls_of_steps
import pytest
import torch
from processes import ranks
from sgd_steps import loops_alike, made, sgd
from steps import Pair
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.errors import RuleError

ALL = (
    "microbatches, amp, keep, reduce_dtype, loss_scale, recompute, zero, clip_norm, clip_parameters, grad_norm, "
    "returns, ema, detect_anomaly, offload, machine, time_limit, memory, overlap, profile, across, "
    "schedule, chunks, stages"
)
SAY = 'say "blocks", "min-cut", '
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"micro_batches": 2}, TypeError, f"train_step has no option 'micro_batches'; near it: microbatches. It has {ALL}"),
    ({"xyz": 2}, TypeError, f"train_step has no option 'xyz'; near it: none. It has {ALL}"),
    *(
        (
            {"microbatches": n},
            ValueError,
            f'microbatches={n!r} is no number of micro-batches; give 1 or more, or "search" for the cheapest',
        )
        for n in (0, -1, True, 2.0, "2")
    ),
    *(
        (
            {"zero": n},
            ValueError,
            f"zero={n!r} is no stage of ZeRO: 0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 "
            f'parameters too, and "search" chooses for each parameter',
        )
        for n in (4, -1, True, 1.0, "1")
    ),
    *(
        ({"clip_norm": n}, ValueError, f"clip_norm={n!r} is no norm above 0; None does not clip, inf only measures")
        for n in (0, -1.0, float("nan"), "1", True)
    ),
    *(
        (
            {"clip_norm": 1.0, "clip_parameters": n},
            ValueError,
            f'clip_parameters={n!r}: "all" measures the gradients of all parameters that require one, '
            f'"optimizer" those of the optimizer\'s',
        )
        for n in ("some", True, 1)
    ),
    *(
        (
            {"grad_norm": n},
            ValueError,
            f"grad_norm={n!r}: True measures the norm of the gradients at each step, False only where clip_norm needs "
            f"it",
        )
        for n in (1, "yes")
    ),
    *(
        (
            {"returns": how},
            ValueError,
            f'returns={how!r}: a step returns its "loss", or the "outputs" of the model; a dict says how those of '
            "the "
            "micro-batches are joined: {'logits': 'cat'}",
        )
        for how in ("logits", True, ["logits"])
    ),
    (
        {"returns": {"logits": "concat"}},
        ValueError,
        "returns={'logits': 'concat'} is no way to join the outputs of micro-batches; there are cat, mean, sum, same, "
        "stack",
    ),
    (
        {"clip_parameters": "all"},
        ValueError,
        "clip_parameters= says which gradients are measured, and none are: give clip_norm= or grad_norm=True too",
    ),
    ({"amp": "bf16-O3"}, ValueError, "no amp='bf16-O3'; near it: bf16-O2, bf16-O1"),
    *(
        ({"amp": n}, ValueError, f"no amp={n!r}; there are: bf16-O1, fp16-O1, bf16-O2, fp16-O2, bf16, fp16, None")
        for n in (True, torch.bfloat16, "")
    ),
    ({"keep": {"aten::silu": "f32"}}, ValueError, "keep= says in which dtype ops run under amp=, which is not given"),
    (
        {"amp": "bf16", "keep": ["aten::silu"]},
        TypeError,
        "keep=['aten::silu'] is no dict of ops and dtypes, as in keep={'aten::silu': 'f32'}",
    ),
    (
        {"amp": "bf16", "keep": {1: 2}},
        TypeError,
        "keep={1: 2} is no dict of ops and dtypes, as in keep={'aten::silu': 'f32'}",
    ),
    (
        {"amp": "bf16", "keep": {"aten::silu": 2}},
        ValueError,
        "keep={'aten::silu': 2}: with bf16-O1 an op runs in 'f32' or 'bf16'",
    ),
    (
        {"amp": "bf16", "keep": {"aten::silu": "f16"}},
        ValueError,
        "keep={'aten::silu': 'f16'}: with bf16-O1 an op runs in 'f32' or 'bf16'",
    ),
    (
        {"amp": "bf16", "keep": {"aten::sillu": "f32"}},
        RuleError,
        "torch has no op 'aten::sillu'; write it as 'add.Tensor' or 'library::op'",
    ),
    ({"profile": 3}, TypeError, "profile=3 is neither a Profile nor the path of a file that one was saved in"),
    *(
        (
            {"amp": "bf16", "reduce_dtype": n},
            ValueError,
            f"reduce_dtype={n!r}: sums in low precision are reduced as they are (None), or in torch.float32",
        )
        for n in ("f32", torch.float64)
    ),
    *(
        (
            {"amp": "fp16", "loss_scale": n},
            TypeError,
            f"loss_scale={n!r} is neither a number, the first scale, nor a LossScaling",
        )
        for n in ("8", True)
    ),
    *(
        (
            {"amp": "fp16", "loss_scale": n},
            ValueError,
            f"loss_scale={n!r} is no first scale of a loss: give 6.10352e-05 or more, such as 1024.0",
        )
        for n in (0, -1.0, float("inf"), float("nan"))
    ),
    (
        {"amp": "bf16-O2", "loss_scale": 8},
        ValueError,
        "loss_scale= is for fp16, whose small gradients are lost; amp='bf16-O2' needs none",
    ),
    *(
        (
            {"detect_anomaly": n},
            ValueError,
            f"detect_anomaly={n!r}: True looks for the first NaN behind each op, False does not",
        )
        for n in (1, "yes")
    ),
    ({"recompute": ""}, ValueError, f"recompute='': {SAY}a glob over module paths, as in \"*.layers.*\", or None"),
]


@pytest.mark.parametrize(("options", "error", "text"), OPTIONS, ids=[str(options) for options, _, _ in OPTIONS])
def test_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Refused by ``train_step``, before anything is captured."""
    with pytest.raises(error) as caught:
        made(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize(("what", "error", "text"), [
    (3, TypeError, 'recompute=3: say "blocks", "min-cut", or a glob over module paths, as in "*.layers.*", or a list '
                   'of globs'),
    ("*.dwon", ValueError, "recompute's glob '*.dwon' matches no module that the step runs; near it: down"),
])  # fmt: skip
def test_recompute(what: Any, error: type[Exception], text: str, data: Any) -> None:
    with pytest.raises(error, match=re.escape(text)):
        made(recompute=what).simulate(*data)


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "other parameters": (
        lambda parallel: torch.optim.SGD([*parallel.parameters(), nn.Parameter(torch.zeros(3, 5))], lr=0.1), ValueError,
        "the optimizer has a parameter that is not the model's: number 4 of group 0, of shape [3, 5]; "
        "make it of the parameters of what parallelize returns, as in SGD(parallel.parameters())",
    ),
    "none at "
    "all": (lambda parallel: None, TypeError,
            "None is a NoneType and no torch.optim.Optimizer; make one from parallel.parameters()"),
    "an unknown one": (
        lambda parallel: torch.optim.LBFGS(parallel.parameters()), TypeError,
        "LBFGS cannot be part of a step's graph: it calls the model several times in a step, through a closure; train "
        "it in the plain loop, on the model that parallelize returns: loss = parallel(…), loss.backward(), "
        "optimizer.step(closure)",
    ),
    # torch's own
    "without "
    "parameters": (lambda parallel: torch.optim.SGD([], lr=0.1), ValueError, "optimizer got an empty parameter list"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    optimizer, error, text = OPTIMIZERS[name]
    with pytest.raises(error) as caught:
        made(optimizer=optimizer)
    assert str(caught.value) == text


class NoLoss(Pair):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.predicted(x), None


class WithoutGradient(Pair):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return nn.functional.mse_loss(self.predicted(x), y).detach()


class Nothing(Pair):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize(("model", "returns"), [(NoLoss, "it returns [8, 8]"), (Nothing, "it returns no tensor")])
def test_a_model_without_a_loss(model: type[Pair], returns: str, data: Any) -> None:
    text = (
        f"a training step needs a loss, and the model returns none: one number that has a gradient ({returns})\n  "
        f"let forward compute the loss"
    )
    with pytest.raises(CaptureError, match=re.escape(text)):
        made(model()).simulate(*data)


def test_a_loss_without_a_gradient(data: Any) -> None:
    text = (
        "the loss has no gradient: no parameter that it depends on requires one\n  let some parameter require a "
        "gradient: requires_grad_(True)"
    )
    step = made()
    step.parallel.requires_grad_(False)
    for one in (made(WithoutGradient()), step):
        with pytest.raises(CaptureError) as caught:
            one.simulate(*data)
        assert str(caught.value) == text


def test_sparse_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4, sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids).square().mean()

    with pytest.raises(
        CaptureError,
        match=r"makes a sparse tensor, which has no pieces\n(.*\n)*  make it dense: to_dense\(\), or sparse=False in "
        r"an embedding",
    ):
        made(Model(), lambda parallel: torch.optim.SGD(parallel.parameters(), lr=0.1)).simulate(torch.tensor([1, 2]))


def test_micro_batches_that_do_not_divide(data: Any) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape(
            "3 micro-batches do not divide a batch of 8 rows (x, y): use a batch of 6 or 9 rows, or microbatches=2"
        ),
    ):
        made(microbatches=3).simulate(*data)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "16 micro-batches do not divide a batch of 8 rows (x, y): use a batch of 16 rows, or microbatches=8"
        ),
    ):
        made(microbatches=16).simulate(*data)
    with pytest.raises(
        ValueError,
        match=r"microbatches=2, but no argument of the step is a tensor with a dim that could be cut; pass "
        r"microbatches=1",
    ):
        made(microbatches=2).simulate(torch.tensor(1.0), torch.tensor(1.0))


def test_zero_without_a_data_axis(data: Any) -> None:
    text = (
        "zero= splits what an axis of the batch replicates, but no axis of the mesh (tp=4) splits an input; use "
        "zero=0, or split the batch"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        made(mesh=Mesh(tp=4), zero=1).simulate(*data)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 1, "tp": 2}, {"tp": 2, "ep": 1, "dp": 1}], ids=str)
def test_zero_over_a_data_axis_of_one_rank(sizes: dict[str, int], zero: int, data: Any) -> None:
    """There is nothing to split, and nothing to refuse."""
    model = Pair()
    alone, step = copy.deepcopy(model), made(model, mesh=Mesh(sizes), zero=zero)
    loops_alike(alone, step, data, step.simulate(*data))


def test_before_processes(data: Any) -> None:
    step = made()
    with pytest.raises(
        RuntimeError,
        match=r"the mesh \(dp=2 tp=2\) needs 4 processes, .* torchrun --nproc-per-node 4, or call "
        r"\.simulate\(\.\.\.\) to run all ranks",
    ):
        step(*data)
    for part in ("program", "reports"):
        with pytest.raises(
            RuntimeError, match=r"nothing has been captured yet; run the step once, or call \.capture\(batch\)"
        ):
            getattr(step, part)


@pytest.mark.processes
def test_on_processes() -> None:
    ranks(4).run(calls_of_steps.bad_input)


def test_arguments_that_forward_does_not_take(data: Any) -> None:
    x = data[0]
    for given in ((), (x,), ({"x": x},)):
        with pytest.raises(TypeError, match=r"missing \d required positional argument"):
            made().simulate(*given)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode(mode: Any, data: Any) -> None:
    """A training step trains: the mode around it is for what is computed there."""
    model = Pair()
    alone, step = copy.deepcopy(model), made(model)
    with mode():
        loss = step.simulate(*data)
    loops_alike(alone, step, data, loss)


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor, torch.Tensor], Any], type[Exception], str]] = {
    "a transform": (
        lambda step, x, y: torch.func.grad(lambda z: step.simulate(z, y))(x), ValueError,
        "torch.func transforms a call of a model on a mesh, whose captured program has gradients through backward() "
        "alone\n    test_step_bad_input.py:347  lambda step, x, y: torch.func.grad(lambda z: step.simulate(z, y))(x), "
        "ValueError,\n  use the transform inside of forward, where it is captured with the model, or loss.backward() "
        "and torch.autograd.grad outside",
    ),
    "no "
    "rows": (lambda step, x, y: step.simulate(x[:0], y[:0]), ValueError,
             "a batch without rows has no loss (x, y); leave it out"),
    "no "
    "values": (lambda step, x, y: step.simulate(x.to("meta"), y), ValueError,
               "x is on the meta device and has no values; to_empty() and init it"),
    "a deep copy": (
        lambda step, x, y: copy.deepcopy(step), TypeError,
        "a training step cannot be copied: its optimizer belongs to one model; copy the model, and call train_step on "
        "the copy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_change_nothing(name: str, data: Any) -> None:
    call, error, text = REFUSED[name]
    step = made(microbatches=2)
    before = [p.clone() for p in step.parallel.parameters()]
    with pytest.raises(error) as caught:
        call(step, *data)
    assert str(caught.value) == text and step.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, step.parallel.parameters(), strict=True))
    assert step.simulate(*data).isfinite()


# -- what may change ---------------------------------------------------------------------------------------------------


def test_two_steps_over_one_model(data: Any) -> None:
    """Each with its optimizer and its stage of ZeRO, one after the other; as two optimizers in torch's loop."""
    model = Pair()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "megatron")
    makes = (sgd, lambda m: torch.optim.AdamW([m.up.weight, m.down.bias], lr=0.01))
    steps = [parallel.train_step(make(parallel), zero=zero) for make, zero in zip(makes, (0, 3), strict=True)]
    optimizers = [make(alone) for make in makes]
    for k in (0, 1, 1, 0, 1):
        alone.zero_grad()
        (wanted := alone(*data)).backward()
        optimizers[k].step()
        torch.testing.assert_close(steps[k].simulate(*data), wanted.detach())
    for a, b in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_group_is_added(data: Any) -> None:
    model = Pair()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "megatron")
    ours, theirs = (torch.optim.AdamW(m.up.parameters(), lr=0.1) for m in (parallel, alone))
    step = parallel.train_step(ours, zero=1)
    for k in range(4):
        if k == 2:
            for optimizer, m in ((ours, parallel), (theirs, alone)):
                optimizer.add_param_group({"params": list(m.down.parameters()), "lr": 0.02, "weight_decay": 0.3})
        alone.zero_grad()
        (wanted := alone(*data)).backward()
        theirs.step()
        torch.testing.assert_close(step.simulate(*data), wanted.detach())
    for a, b in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert step.captures == 2 and {float(one["step"]) for one in ours.state.values()} == {4.0, 2.0}


def test_shapes_modes_and_what_is_trained_may_change() -> None:
    """Each is captured once; the optimizer's state goes on."""
    step = made(microbatches=2)
    parallel = step.parallel
    alone = copy.deepcopy(parallel.module)
    optimizer = sgd(alone)

    def both(rows: int) -> None:
        torch.manual_seed(rows)
        data = torch.randn(rows, 8), torch.randn(rows, 8)
        optimizer.zero_grad()
        (wanted := alone(*data)).backward()
        optimizer.step()
        torch.testing.assert_close(step.simulate(*data), wanted.detach())

    for rows, captures in ((8, 1), (12, 2), (8, 2)):
        both(rows)
        assert step.captures == captures
    parallel.eval(), alone.eval()
    both(8)
    assert step.captures == 3
    parallel.train(), alone.train()
    parallel.up.requires_grad_(False), alone.up.requires_grad_(False)
    both(8)
    assert step.captures == 4
    parallel.up.requires_grad_(True), alone.up.requires_grad_(True)
    both(8)
    assert step.captures == 4
    for a, b in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# -- recapture=False ---------------------------------------------------------------------------------------------------


def test_other_shapes_are_refused_with_recapture_off(data: Any) -> None:
    """In the words of the model's own call; another mode is none."""
    x, y = data
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), "ddp", recapture=False)
    step = parallel.train_step(sgd(parallel))
    step.simulate(x, y)
    parallel.simulate(x, y)
    before = [p.clone() for p in parallel.parameters()]
    texts = []
    for call in (step.simulate, step.capture, parallel.simulate):
        with pytest.raises(RuntimeError) as caught:
            call(x[:6], y[:6])
        texts.append(str(caught.value))
    assert set(texts) == {
        "the step was captured for other arguments, and recapture=False: x is float32[6, 8] on cpu, it was float32[8, "
        "8] on cpu, y is float32[6, 8] on cpu, it was float32[8, 8] on cpu; pad to one shape, or allow recapture=True"
    }
    assert step.captures == 1 and all(torch.equal(a, b) for a, b in zip(before, parallel.parameters(), strict=True))
    parallel.eval()
    step.simulate(x, y)
    assert step.captures == 2


def test_other_parameters_of_the_optimizer_are_no_other_arguments(data: Any) -> None:
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), "ddp", recapture=False)
    optimizer = torch.optim.SGD(parallel.up.parameters(), lr=0.1)
    step = parallel.train_step(optimizer)
    step.simulate(*data)
    optimizer.add_param_group({"params": list(parallel.down.parameters())})
    step.simulate(*data)
    assert step.captures == 2


def test_a_recapture_is_in_the_report(data: Any) -> None:
    x, y = data
    step = made()
    step.capture(x, y)
    assert not any("of this model" in note for note in step.reports["capture"].notes)
    step.capture(x[:6], y[:6])
    assert (
        "capture 2 of this model: x is float32[6, 8] on cpu, it was float32[8, 8] on cpu"
        in step.reports["capture"].notes[0]
    )
