"""Wrong input to a step: one clear error each, which names the offender and the remedy, and changes nothing; and what may change."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import calls_of_steps
import pytest
import torch
from processes import ranks
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.errors import RuleError


class Pair(nn.Module):
    """A column-row pair and the mean square error of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return nn.functional.mse_loss(self.predicted(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def made(model: nn.Module | None = None, optimizer: Callable[[nn.Module], Any] = sgd, mesh: Mesh | None = None, **options: Any) -> Any:
    parallel = autopar.parallelize(model or Pair(), mesh or Mesh(dp=2, tp=2))
    return parallel.train_step(optimizer(parallel), **options)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randn(8, 8)


ALL = "microbatches, amp, keep, reduce_dtype, loss_scale, recompute, zero, clip_norm, ema, detect_anomaly, offload"
SAY = 'say "blocks", "min-cut", '
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"micro_batches": 2}, TypeError, f"train_step has no option 'micro_batches'; near it: microbatches. It has {ALL}"),
    ({"xyz": 2}, TypeError, f"train_step has no option 'xyz'; near it: none. It has {ALL}"),
    *(({"microbatches": n}, ValueError, f"microbatches={n!r} is no number of micro-batches; give 1 or more") for n in (0, -1, True, 2.0, "2")),
    *(
        ({"zero": n}, ValueError, f"zero={n!r} is no stage of ZeRO: 0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too")
        for n in (4, -1, True, 1.0, "1")
    ),
    *(({"clip_norm": n}, ValueError, f"clip_norm={n!r} is no norm above 0; None does not clip, inf only measures") for n in (0, -1.0, float("nan"), "1", True)),
    ({"amp": "bf16-O3"}, ValueError, "no amp='bf16-O3'; near it: bf16-O2, bf16-O1"),
    *(({"amp": n}, ValueError, f"no amp={n!r}; there are: bf16-O1, fp16-O1, bf16-O2, fp16-O2, bf16, fp16") for n in (True, torch.bfloat16, "")),
    ({"keep": {"aten::silu": "f32"}}, ValueError, "keep= says in which dtype ops run under amp=, which is not given"),
    ({"amp": "bf16", "keep": ["aten::silu"]}, TypeError, "keep=['aten::silu'] is no dict of ops and dtypes, as in keep={'aten::silu': 'f32'}"),
    ({"amp": "bf16", "keep": {1: 2}}, TypeError, "keep={1: 2} is no dict of ops and dtypes, as in keep={'aten::silu': 'f32'}"),
    ({"amp": "bf16", "keep": {"aten::silu": 2}}, ValueError, "keep={'aten::silu': 2}: with bf16-O1 an op runs in 'f32' or 'bf16'"),
    ({"amp": "bf16", "keep": {"aten::silu": "f16"}}, ValueError, "keep={'aten::silu': 'f16'}: with bf16-O1 an op runs in 'f32' or 'bf16'"),
    ({"amp": "bf16", "keep": {"aten::sillu": "f32"}}, RuleError, "torch has no op 'aten::sillu'; write it as 'add.Tensor' or 'library::op'"),
    *(
        ({"amp": "bf16", "reduce_dtype": n}, ValueError, f"reduce_dtype={n!r}: sums in low precision are reduced as they are (None), or in torch.float32")
        for n in ("f32", torch.float64)
    ),
    *(({"amp": "fp16", "loss_scale": n}, TypeError, f"loss_scale={n!r} is neither a number, the first scale, nor a LossScaling") for n in ("8", True)),
    *(
        ({"amp": "fp16", "loss_scale": n}, ValueError, f"loss_scale={n!r} is no first scale of a loss: give 6.10352e-05 or more, such as 1024.0")
        for n in (0, -1.0, float("inf"), float("nan"))
    ),
    ({"amp": "bf16-O2", "loss_scale": 8}, ValueError, "loss_scale= is for fp16, whose small gradients are lost; amp='bf16-O2' needs none"),
    *(
        ({"detect_anomaly": n}, ValueError, f"detect_anomaly={n!r}: True looks for the first NaN behind each op, False does not")
        for n in (1, "yes")
    ),
    ({"recompute": ""}, ValueError, f'recompute=\'\': {SAY}a glob over module paths, as in "*.layers.*", or None'),
]


@pytest.mark.parametrize(("options", "error", "text"), OPTIONS, ids=[str(options) for options, _, _ in OPTIONS])
def test_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Refused by ``train_step``, before anything is captured."""
    with pytest.raises(error) as caught:
        made(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize(("what", "error", "text"), [
    (3, TypeError, 'recompute=3: say "blocks", "min-cut", or a glob over module paths, as in "*.layers.*", or a list of globs'),
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
    "none at all": (lambda parallel: None, TypeError, "None is a NoneType and no torch.optim.Optimizer; make one of parallel.parameters()"),
    "an unknown one": (
        lambda parallel: torch.optim.LBFGS(parallel.parameters()), TypeError,
        "LBFGS cannot be part of a step's graph: nothing is known of its step. Known are Adagrad, Adam, AdamW, SGD; "
        "say how LBFGS works with autopar.optimizers.register_optimizer(LBFGS, state=…, update=…)",
    ),
    "without parameters": (lambda parallel: torch.optim.SGD([], lr=0.1), ValueError, "optimizer got an empty parameter list"),  # torch's own
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
    text = f"a training step needs a loss, and the model returns none: one number that has a gradient ({returns})\n  let forward compute the loss"
    with pytest.raises(CaptureError, match=re.escape(text)):
        made(model()).simulate(*data)


def test_a_loss_without_a_gradient(data: Any) -> None:
    text = "the loss has no gradient: no parameter that it depends on requires one\n  let some parameter require a gradient: requires_grad_(True)"
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

    with pytest.raises(CaptureError, match=r"makes a sparse tensor, which has no pieces\n(.*\n)*  make it dense: to_dense\(\), or sparse=False in an embedding"):
        made(Model(), lambda parallel: torch.optim.SGD(parallel.parameters(), lr=0.1)).simulate(torch.tensor([1, 2]))


def test_micro_batches_that_do_not_divide(data: Any) -> None:
    with pytest.raises(ValueError, match=re.escape("3 micro-batches do not divide a batch of 8 rows (x, y): use a batch of 6 or 9 rows, or microbatches=2")):
        made(microbatches=3).simulate(*data)
    with pytest.raises(ValueError, match=re.escape("16 micro-batches do not divide a batch of 8 rows (x, y): use a batch of 16 rows, or microbatches=8")):
        made(microbatches=16).simulate(*data)
    with pytest.raises(ValueError, match=r"microbatches=2, but no argument of the step is a tensor with a dim that could be cut; pass microbatches=1"):
        made(microbatches=2).simulate(torch.tensor(1.0), torch.tensor(1.0))


def test_zero_without_a_data_axis(data: Any) -> None:
    text = "zero= splits what an axis of the batch replicates, but no axis of the mesh (tp=4) splits an input; use zero=0, or split the batch"
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
    with pytest.raises(RuntimeError, match=r"the mesh \(dp=2 tp=2\) needs 4 processes, .* torchrun --nproc-per-node 4, or call \.simulate\(\.\.\.\) to run all ranks"):
        step(*data)
    for part in ("program", "reports"):
        with pytest.raises(RuntimeError, match=r"nothing has been captured yet; run the step once, or call \.capture\(batch\)"):
            getattr(step, part)


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
        "x is inside a torch.func transform or carries a forward-mode tangent; a captured step has gradients through backward() alone",
    ),
    "no rows": (lambda step, x, y: step.simulate(x[:0], y[:0]), ValueError, "a batch without rows has no loss (x, y); leave it out"),
    "no values": (lambda step, x, y: step.simulate(x.to("meta"), y), ValueError, "x is on the meta device and has no values; to_empty() and init it"),
    "a deep copy": (
        lambda step, x, y: copy.deepcopy(step), TypeError,
        "a training step is not copied: its optimizer has the parameters of one model; copy that, and make another step of it",
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


def loops_alike(alone: nn.Module, step: Any, data: Any, loss: torch.Tensor) -> None:
    """One step of torch's loop, beside one of ours that was just taken."""
    optimizer = sgd(alone)
    wanted = alone(*data)
    wanted.backward()
    optimizer.step()
    torch.testing.assert_close(loss, wanted.detach())
    for a, b in zip(step.parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# -- what may change ---------------------------------------------------------------------------------------------------


def test_two_steps_over_one_model(data: Any) -> None:
    """Each with its optimizer and its stage of ZeRO, one after the other; as two optimizers in torch's loop."""
    model = Pair()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2))
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
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2))
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


@pytest.mark.parametrize("loss", [lambda h, y: (h - y).square().sum(), lambda h, y: (h - y).square().mean().sqrt()], ids=["a sum", "a root"])
def test_a_loss_that_is_no_mean_is_told(loss: Any) -> None:
    """The numbers of micro-batches are not those of the whole batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(self.up(x), y)

    for microbatches in (1, 2):
        parallel = autopar.parallelize(Model(), Mesh(dp=2))
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=microbatches)
        batch = torch.randn(8, 4), torch.randn(8, 4)
        if microbatches == 1:
            step.capture(*batch)
            continue
        with pytest.warns(UserWarning, match=r"(?s)not that of the whole batch: a term of it is no sum .*test_step_bad_input\.py.*write it as a mean.*, or use microbatches=1"):
            step.capture(*batch)


# -- what is cut into micro-batches ------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention of rows to rows, with a mask that all of the batch share, and where they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.place = nn.Linear(6, 6), nn.Embedding(8, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, places: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.place(places)
        return nn.functional.mse_loss((self.query(x) @ x.transpose(1, 2) + mask).softmax(-1) @ x, y)


def masked(rows: int = 4) -> tuple[torch.Tensor, ...]:
    """As many rows as positions."""
    return torch.randn(rows, rows, 6), torch.full((rows, rows), -9.0).triu(1), torch.arange(rows), torch.randn(rows, rows, 6)


WHOLE = {"*mask": (None, None), "*places": (None,)}
ROWS = {"*.x": ("dp",), "*.y": ("dp",)}
PLANS: list[tuple[Any, dict[str, int]]] = [
    (WHOLE, {"dp": 1}),
    (WHOLE, {"dp": 2}),
    (WHOLE, {"dp": 2, "tp": 2}),
    ({**WHOLE, **ROWS}, {"dp": 1}),
    ({**WHOLE, **ROWS}, {"dp": 2}),
    ([WHOLE, ROWS], {"dp": 2}),
]


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize(("plan", "sizes"), PLANS)
def test_what_the_plan_names_whole_is_not_cut(plan: Any, sizes: dict[str, int], microbatches: int) -> None:
    """Though its dim 0 is as long as the batch; and what the plan does not name is split as without it."""
    model, data = Masked(), masked()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan)
    step = parallel.train_step(sgd(parallel), microbatches=microbatches)
    loops_alike(alone, step, data, step.simulate(*data))
    text = str(step.program.micro)
    assert "mask : f32[4 4] = input" in text
    rows = 4 // microbatches
    assert f"x : f32[{rows}{'/dp' * (sizes['dp'] > 1)} 4 6] = input" in text


@pytest.mark.parametrize("plan", [{"scale": (None,), "x": ("dp",), "y": ("dp",)}, {"x": ("dp",), "y": ("dp",)}], ids=["all are named", "rows are named"])
def test_what_the_plan_splits_over_the_data_axis_is_cut(plan: Any) -> None:
    """Also where it is longer than the batch, and where a tensor that is none of the batch comes first."""

    class Flat(Pair):
        def forward(self, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.predicted(x).flatten(0, 1) * scale, y)

    model, data = Flat(), (torch.rand(8), torch.randn(4, 3, 8), torch.randn(12, 8))
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), plan)
    step = parallel.train_step(sgd(parallel), microbatches=2)
    loops_alike(alone, step, data, step.simulate(*data))
    with pytest.raises(ValueError, match=re.escape("3 micro-batches do not divide a batch of 4 rows (x): use a batch of 3 or 6 rows")):
        parallel.train_step(sgd(parallel), microbatches=3).simulate(*data)
    with pytest.raises(ValueError, match=re.escape("4 micro-batches do not divide a batch of 11 rows (y): use a batch of 8 or 12 rows")):
        parallel.train_step(sgd(parallel), microbatches=4).simulate(*data[:2], data[2][:11])


def test_an_input_that_is_called_as_a_parameter_is_not_what_the_plan_names() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ((x * self.weight).sum(1) * weight).mean()

    model, data = Weighted(), (torch.randn(8, 4), torch.rand(8))
    alone = copy.deepcopy(model)
    step = autopar.parallelize(model, Mesh(dp=2, tp=2), {"weight": ("tp",)}).train_step(sgd(model), microbatches=2)
    loops_alike(alone, step, data, step.simulate(*data))


def test_one_micro_batch_of_two_batches() -> None:
    """The shapes that it has say nothing of what was cut."""

    class Weighted(Pair):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (self.predicted(x).square().mean(1) * w.square().mean()).mean()

    step = made(Weighted(), mesh=Mesh(dp=2), microbatches=2)
    x = torch.randn(8, 8)
    step.simulate(x, torch.rand(4))
    with pytest.warns(UserWarning, match="rows of the batch meet"):
        step.simulate(x, torch.rand(8))
    assert step.captures == 2


def test_a_plan_that_leaves_nothing_to_cut(data: Any) -> None:
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), {"x": (None,), "*.y": (None, "dp")})
    text = (
        "microbatches=2, but no argument of the step is a tensor with a dim that could be cut, for no axis of the batch splits dim 0 of x, y in the plan; "
        "pass microbatches=1"
    )
    with pytest.raises(ValueError) as caught:
        parallel.train_step(sgd(parallel), microbatches=2).simulate(*data)
    assert str(caught.value) == text


@pytest.mark.parametrize(("mesh", "end"), [(Mesh(dp=2), ""), (Mesh(tp=2), ", on a mesh with an axis for the batch, as dp=1")], ids=["dp", "tp"])
def test_a_square_tensor_that_is_cut_is_told_once(mesh: Mesh, end: str) -> None:
    step = made(Masked(), mesh=mesh, microbatches=4)
    with pytest.warns(UserWarning) as told:
        step.simulate(*masked())
        step.simulate(*masked())
    assert [str(one.message) for one in told] == [
        "the argument mask, [4, 4], was cut into 4 micro-batches, for its dim 0 is as long as the batch; but so is its dim 1. "
        f'If it is none of the batch, as a mask that all rows share, say so in the plan: {{"mask": (None, None)}}{end}'
    ]
    assert told[0].filename == __file__


@pytest.mark.parametrize("data", [
    (torch.randn(8, 8), torch.randn(8, 8)),  # as the first
    (torch.randn(8, 4, 8), torch.randn(8, 4, 8)),
    (torch.randn(8, 4, 8), torch.randn(8, 1, 8)),
], ids=["square", "long", "one column"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_rows_that_are_no_mask_are_not_told(data: Any) -> None:
    made(microbatches=2).capture(*data)


def test_an_error_of_the_model_says_how_the_batch_was_cut() -> None:
    step = made(Masked(), mesh=Mesh(dp=2), microbatches=2)
    with pytest.warns(UserWarning, match="the argument mask"), pytest.raises(RuntimeError, match="broadcast") as caught:
        step.simulate(*masked())
    assert caught.value.__notes__[-1] == (
        "autopar cut the batch into 2 micro-batches, in each of which x has 2 of 4 rows, mask has 2 of 4 rows, places has 2 of 4 rows, y has 2 of 4 rows\n"
        '  if places is none of the batch, say so in the plan: {"places": (None,)}'
    )


# -- a batch that is one argument --------------------------------------------------------------------------------------


class OfPair(Pair):
    def forward(self, pair: Any) -> torch.Tensor:
        return super().forward(*pair)


class OfPairAndScale(Pair):
    def forward(self, pair: Any, scale: float = 1.0) -> torch.Tensor:
        return super().forward(*pair[:2]) * scale


class OfMany(Pair):
    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return super().forward(x, *more)


@pytest.mark.parametrize(("model", "batch"), [
    (OfPair, lambda x, y: (x, y)),
    (OfPair, lambda x, y: [x, y]),
    (OfPair, lambda x, y: ((x, y),)),  # its parts, of which there is one
    (OfPairAndScale, lambda x, y: (x, y, x)),
    (OfPairAndScale, lambda x, y: ((x, y), 1.0)),
    (OfMany, lambda x, y: (x, y)),
    (Pair, lambda x, y: (x, y)),
])  # fmt: skip
def test_a_forward_of_one_tuple_or_list_gets_it_whole(model: type[Pair], batch: Any, data: Any) -> None:
    """Where it has more parts than forward takes arguments."""
    one = model()
    wanted = Pair.forward(one, *data).detach()
    torch.testing.assert_close(made(one, microbatches=2).simulate(batch(*data)), wanted)


# -- recapture=False ---------------------------------------------------------------------------------------------------


def test_other_shapes_are_refused_with_recapture_off(data: Any) -> None:
    """In the words of the model's own call; another mode is none."""
    x, y = data
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), recapture=False)
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
        "the step was captured for other arguments, and recapture=False: x is float32[6, 8] on cpu, it was float32[8, 8] on cpu, "
        "y is float32[6, 8] on cpu, it was float32[8, 8] on cpu; pad to one shape, or allow recapture=True"
    }
    assert step.captures == 1 and all(torch.equal(a, b) for a, b in zip(before, parallel.parameters(), strict=True))
    parallel.eval()
    step.simulate(x, y)
    assert step.captures == 2


def test_other_parameters_of_the_optimizer_are_no_other_arguments(data: Any) -> None:
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), recapture=False)
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
    assert "capture 2 of this model: x is float32[6, 8] on cpu, it was float32[8, 8] on cpu" in step.reports["capture"].notes[0]
