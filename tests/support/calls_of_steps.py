"""What people do with a training step, on each of four processes."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from types import FrameType
from typing import Any

import loops
import pytest
import steps
import torch
from equality import relative
from steps import Single, adamw, differences, run
from torch import distributed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autopar
from autopar import Mesh
from autopar.runtime.dtensors import is_dtensor

CALLS = ["pieces_of_each_rank", "loaded_states", "moved_by_zero", "beside_the_loop", "batches_that_differ",
         "evaluation_between", "optimizers", "pieces_of_unlike_sizes", "calls_of_unlike_sizes",
         "micro_batches_of_unlike_sizes"]  # fmt: skip
SIZES = {"dp": 2, "tp": 2}
SENDING = ("all_", "broadcast", "barrier", "reduce", "gather", "scatter", "send", "isend", "recv", "irecv")


def _made(**options: Any) -> tuple[Any, Single, Any]:
    torch.manual_seed(0)
    make, batches, plan = steps.MODELS["mlp"]
    model = make()
    alone = copy.deepcopy(model)
    given = {key: options.pop(key) for key in ("inputs",) if key in options}
    parallel = autopar.parallelize(model, Mesh(SIZES), plan, **given)
    return (
        parallel.train_step(adamw(parallel), **options),
        Single(alone, adamw(alone), options.get("clip_norm")),
        batches,
    )


def pieces_of_each_rank() -> None:
    """Each rank brings its own rows; those of the first micro-batch of all ranks are the first micro-batch."""
    step, single, batches = _made(microbatches=2, inputs="local", zero=1)
    dp = Mesh(SIZES).coordinates(distributed.get_rank())["dp"]
    for k in range(3):
        x = batches(k)["x"]
        assert relative(step(x.chunk(2)[dp]), single(x)[0]) <= 1e-12
    assert max(differences(step, single).values()) <= 1e-9


def loaded_states() -> None:
    """Full tensors and DTensors, of torch's optimizer and of another stage of ZeRO."""
    step, single, batches = _made(zero=1)
    for k in range(2):
        run(step, batches(k)), single(**batches(k))
    state = step.optimizer.state_dict()
    split = [
        value
        for one in state["state"].values()
        for value in one.values()
        if is_dtensor(value) and any(p.is_shard(0) for p in value.placements)
    ]
    assert split, "the state of some parameter is split"
    other = step.parallel.train_step(torch.optim.AdamW(loops.groups_of(step.parallel), lr=1e-2), zero=0)
    other.optimizer.load_state_dict(copy.deepcopy(state))
    run(other, batches(2)), single(**batches(2))
    assert max(differences(other, single).values()) <= 1e-9
    other.optimizer.load_state_dict(copy.deepcopy(single.optimizer.state_dict()))  # full tensors
    run(other, batches(3)), single(**batches(3))
    assert max(differences(other, single).values()) <= 1e-9


def moved_by_zero() -> None:
    """ZeRO 3 splits the parameters, which stay the same objects; without it they stay where they are."""
    step, single, batches = _made(zero=3)
    before = {name: id(p) for name, p in step.parallel.named_parameters()}
    whole = step.parallel.inner.blocks[0].down.bias
    assert all(p.is_replicate() for p in whole.placements)
    run(step, batches(0)), single(**batches(0))
    assert before == {name: id(p) for name, p in step.parallel.named_parameters()}
    assert whole.placements[0].is_shard(0) and whole.to_local().numel() == 4
    assert max(differences(step, single).values()) <= 1e-9
    out = step.parallel(**batches(1))
    assert relative(loops.whole(out), single.model(**batches(1))) <= 1e-12


def beside_the_loop() -> None:
    """A step, then the loop with torch's own optimizer, then a step."""
    step, single, batches = _made()
    for k in range(4):
        if k % 2:
            step.parallel(**batches(k)).backward()
            step.optimizer.step()
            step.optimizer.zero_grad()
        else:
            run(step, batches(k))
        single(**batches(k))
    assert max(differences(step, single).values()) <= 1e-9


def batches_that_differ() -> None:
    """Ranks that bring other values of one batch are told so, and none hangs."""
    step, _, batches = _made()
    with pytest.raises(RuntimeError, match="bring different values of x"):
        run(step, batches(distributed.get_rank()))


def after_a_refusal() -> None:
    """What the ranks do alike after a call that was refused is not: another shape, new or known, other values, another
    program."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    make, batches, _ = steps.MODELS["mlp"]
    model = make()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=size), "ddp")
    step, single = parallel.train_step(adamw(parallel), zero=1), Single(alone, adamw(alone))

    def refused(x: torch.Tensor, match: str = "the ranks make different calls\n") -> None:
        with pytest.raises(RuntimeError, match=match):
            step(x)

    for k in range(7):
        x = batches(k)["x"]
        if k < 2:
            refused(x[: 2 * size * (1 + rank)])
        elif k == 2:
            refused(x[: 6 * (1 + rank)])  # all of it is known
        elif k == 3:
            refused(x + rank, "bring different values of x")
        elif k == 4:
            step.optimizer.param_groups[0]["eps"] = 1e-6 if rank else 1e-7  # a constant: another update
            refused(x), refused(x)
            step.optimizer.param_groups[0]["eps"] = 1e-8
        elif k == 5:
            step.optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)  # as by a schedule that looks at this rank's loss
            refused(x, r"train step .* by AdamW\(weight_decay=0\.1, lr=0\.05, betas=\(0\.9, 0\.999\), .*, zero=1\n")
            step.optimizer.param_groups[0]["lr"] = 1e-2
        else:
            parallel.train(not rank)
            refused(x)
            parallel.train()
        assert relative(step(x), single(x)[0]) <= 1e-12, k
    assert max(differences(step, single).values()) <= 1e-9


def evaluation_between() -> None:
    step, single, batches = _made(zero=1)
    for k in range(2):
        run(step, batches(k)), single(**batches(k))
        step.parallel.eval(), single.model.eval()
        with torch.no_grad():
            assert relative(step.parallel(**batches(9)), single.model(**batches(9))) <= 1e-12
        step.parallel.train(), single.model.train()


def optimizers() -> None:
    for make in (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    ):
        steps.steps_alike("mlp", SIZES, {"zero": 1, "microbatches": 2}, count=2, optimizer=make)


def one_rank_overflows() -> None:
    """Only the rows of the last rank are too large: no rank takes the step, and all lower the scale."""
    torch.manual_seed(0)
    make, batches, _ = steps.MODELS["mlp"]
    parallel = autopar.parallelize(make().float(), Mesh(dp=4), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), amp="fp16-O2", loss_scale=8.0, zero=1)
    for k in range(3):
        batch = steps.narrow(batches(k))
        if k == 1:
            batch["x"][-1] = 1e4
        before = [p.to_local().clone() for p in parallel.parameters()]
        run(step, batch, promoted=False)
        same = all(torch.equal(a, p.to_local()) for a, p in zip(before, parallel.parameters(), strict=True))
        assert bool(step.skipped) == same == (k == 1), k
    assert float(step.scaler[0]) == 4


def bad_input() -> None:
    """What only processes meet; every rank is told, and none hangs."""
    make, batches, plan = steps.MODELS["mlp"]
    model = make()
    early = torch.optim.AdamW(model.parameters())
    parallel = autopar.parallelize(model, Mesh(SIZES), plan)
    with pytest.raises(
        ValueError,
        match=r"a parameter that is not the model's: number 0 of group 0, of shape \[8\]; .* as in "
        r"AdamW\(parallel\.parameters\(\)\)",
    ):
        parallel.train_step(early)
    step = parallel.train_step(adamw(parallel), microbatches=2, zero=1)
    with pytest.raises(
        RuntimeError, match="are sharded over processes; to simulate, call parallelize in a process that is alone"
    ):
        step.simulate(batches(0))
    x = batches(0)["x"]
    placed = distribute_tensor(x, parallel.job.device_mesh, [Shard(0), Replicate()])
    with pytest.raises(
        ValueError,
        match="the argument x is a DTensor, which is not cut into micro-batches; pass plain tensors, or microbatches=1",
    ):
        step(placed)
    whole = step.parallel.train_step(step.optimizer, zero=1)
    alone = Single(copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0))
    assert relative(run(whole, placed), alone(x)[0]) <= 1e-12
    before = {name: loops.whole(p) for name, p in parallel.named_parameters()}
    with pytest.raises(
        RuntimeError,
        match=r"the ranks make different calls\n    ranks 0 2: train step \(x float64\[12, 8\]\) .*\n    ranks 1 3: "
        r".*\[10, 8\]",
    ):
        run(step, x[: 12 - 2 * (distributed.get_rank() % 2)])
    assert all(torch.equal(before[name], loops.whole(p)) for name, p in parallel.named_parameters())


def loss_of_a_step() -> None:
    """Of what a step returns: it can be summed over processes, and its backward has run."""
    parallel = autopar.parallelize(steps.Pair(), Mesh(dp=2), "ddp")
    loss = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))(torch.randn(4, 8), torch.randn(4, 8))
    before = float(loss)
    torch.distributed.all_reduce(loss)
    assert abs(float(loss) - 2 * before) < 1e-6 * before
    with pytest.raises(
        RuntimeError, match=r"^the step has already run its backward and its optimizer.*remove loss\.backward\(\)"
    ):
        loss.backward()


def pieces_of_unlike_sizes() -> None:
    """Ranks along dp bring other numbers of rows, also none; the losses and the gradients of steps are those of all
    rows."""
    step, single, batches = _made(inputs="local", zero=1)
    dp = Mesh(SIZES).coordinates(distributed.get_rank())["dp"]
    for rows, first in ((12, 6), (5, 3), (5, 0), (12, 6)):
        x = batches(first)["x"][:rows]
        assert relative(step((x[:first], x[first:])[dp]), single(x)[0]) <= 1e-12, (rows, first)
    assert max(differences(step, single).values()) <= 1e-9
    assert step.captures == 2, "of 12 rows and of 5"


def calls_of_unlike_sizes() -> None:
    """Of the model itself: outputs in the order of the ranks, gradients of parameters and of the pieces; what does not
    fit is an error on all."""
    rank = distributed.get_rank()
    dp = Mesh(SIZES).coordinates(rank)["dp"]
    torch.manual_seed(0)
    model, x, y = Scaled().double(), torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    scale, alone = torch.rand(2, dtype=torch.float64), copy.deepcopy(model)
    for outputs in ("sharded", "global"):
        parallel = autopar.parallelize(
            model,
            Mesh(SIZES),
            {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")},
            inputs="local",
            outputs=outputs,
        )
        for rows, first in ((5, 3), (5, 2), (5, 5), (5, 0), (1, 1)):
            own, theirs = (x[:first], x[first:rows])[dp].clone().requires_grad_(), x[:rows].clone().requires_grad_()
            wanted, found = alone(theirs, y[:rows], scale), parallel(own, (y[:first], y[first:rows])[dp], scale)
            assert (
                is_dtensor(found[1]) == (outputs == "sharded") and relative(loops.whole(found[1]), wanted[1]) <= 1e-12
            )
            wanted[0].backward(), found[0].backward()
            assert relative(found[0], wanted[0]) <= 1e-12 and torch.allclose(
                own.grad, (theirs.grad[:first], theirs.grad[first:])[dp], 0, 1e-12
            )
        assert all(
            relative(loops.whole(a.grad), b.grad) <= 1e-10
            for a, b in zip(parallel.parameters(), alone.parameters(), strict=True)
        )
        alone.zero_grad()
    pieces = (x[:3], x[3:])[dp], (y[:3], y[3:])[dp], scale
    for match, args in {
        "^the pieces of x do not fit together: float64\\[3, 8\\] on rank 0, float64\\[2, 7\\] on rank 2\n  they may "
        "differ in the length of dim 0, along dp$":
            ((x[:3], x[3:, :7])[dp], *pieces[1:]),
        "^the pieces of scale do not fit together: float64\\[2\\] on rank 0, float64\\[1\\] on rank 2\n  it must be "
        "the same on all ranks, because the plan does not split it$":
            (*pieces[:2], scale[: 2 - dp]),
        "^the pieces of x do not fit together: float64\\[3, 8\\] on rank 0, float32\\[2, 8\\] on rank "
        "2": ((x[:3], x[3:].float())[dp], *pieces[1:]),
        "^the pieces of x do not fit together: float64\\[3, 8\\] on rank 0, float64\\[2, 8\\] on rank "
        "1": (x[: 3 - rank % 2], y[: 3 - rank % 2], scale),
        "^ranks 0 and 1 bring different values of x, which must be equal on these ranks: both hold the piece at "
        "dp=0": (pieces[0] + rank, *pieces[1:]),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=match):
            parallel(*args)
        assert relative(parallel(*pieces)[0], alone(x, y, scale)[0]) <= 1e-12


def micro_batches_of_unlike_sizes() -> None:
    """They are cut of all rows, which may be more than those of a rank; the outputs are in the order of the ranks."""
    dp = Mesh(SIZES).coordinates(distributed.get_rank())["dp"]
    torch.manual_seed(0)
    model, x, y, scale = (
        Scaled().double(),
        *torch.randn(2, 6, 8, dtype=torch.float64),
        torch.rand(2, dtype=torch.float64),
    )
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(SIZES), "megatron", inputs="local")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, returns="outputs")
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    for first in (5, 0, 2):
        found, wanted = step((x[:first], x[first:])[dp], (y[:first], y[first:])[dp], scale), alone(x, y, scale)
        wanted[0].backward(), single.step(), single.zero_grad()
        assert relative(found[0], wanted[0]) <= 1e-12 and relative(loops.whole(found[1]), wanted[1]) <= 1e-12
    assert all(
        relative(loops.whole(a), b) <= 1e-10 for a, b in zip(parallel.parameters(), alone.parameters(), strict=True)
    )
    with pytest.raises(ValueError, match="2 micro-batches do not divide a batch of 5 rows"):
        step((x[:2], x[2:5])[dp], (y[:2], y[2:5])[dp], scale)


class Scaled(steps.Pair):
    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> Any:
        out = self.predicted(x) * scale.sum()
        return torch.nn.functional.mse_loss(out, y), out


def messages_of_a_step() -> None:
    """A step sends one message beside its collectives, and calls little Python around them.

    The message is the digest of the call. Waits skip torch's Python kernel for autograd.
    """
    step, _, batches = _made(microbatches=2)
    run(step, batches(0))
    sent, slow = Counter[str](), Counter[str]()
    control, functions = step._calls.job.control, distributed.distributed_c10d.__file__

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            slow[frame.f_code.co_name] += frame.f_code.co_filename.endswith("_library/autograd.py")
            if frame.f_code.co_filename == functions and frame.f_locals.get("group") is control:
                sent[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        step(batches(1))
    finally:
        sys.setprofile(None)
    assert sent.pop("all_to_all_single", 0) == 1, "all ranks compare the call once, and not before each micro-batch"
    assert not [name for name in sent if name.startswith(SENDING)]
    assert slow["autograd_impl"] <= 1, "the waits of the step's many collectives skip it"
