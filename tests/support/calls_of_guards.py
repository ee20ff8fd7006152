"""Python values that forward reads, changed on each of two processes."""

from __future__ import annotations

import copy

import torch
from equality import TOLERANCE, relative
from error_texts import refused
from guarded_models import Reader, Weighted
from torch import distributed

import autopar
from autopar import Mesh

d = torch.float64


def changed_in_either_model() -> None:
    """In the model that was parallelized, or in what was returned: before the first call, between calls, in forward and
    in a step."""
    torch.manual_seed(0)
    model, x = Reader(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), outputs="global")
    model.beta = 2.0
    assert relative(parallel(x), model(x)) <= TOLERANCE
    model.drop.p, model.config.inner.scale, model.flag = 0.0, 3.0, True
    assert relative(parallel(x), model(x)) <= TOLERANCE
    model.weights.append(1.0)
    model.weights[0] = 0.75
    assert relative(parallel(x), model(x)) <= TOLERANCE
    parallel.beta = model.beta = 4.0
    parallel.config.mode = model.config.mode = "minus"
    assert relative(parallel(x), model(x)) <= TOLERANCE and parallel.captures == 4
    parallel.beta = 5.0  # the copy's alone
    assert (model.beta, parallel.beta, parallel.module.beta) == (4.0, 5.0, 5.0)
    model.l.register_forward_hook(lambda *_: None)
    said = refused(RuntimeError, lambda: parallel(x))
    assert said == (
        "l.forward_hooks was changed in the model that was parallelized, but each process runs a copy of it\n"
        "  change it in what parallelize has returned: parallel.l.forward_hooks; or before parallelize"
    ), said


def annealed() -> None:
    """A weight of the loss that changes at each step: in the model's own attribute, by ``parallel(...)`` and by a
    step."""
    torch.manual_seed(0)
    model, x = Weighted(), torch.randn(4, 4, dtype=d)
    single = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, zero=1)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for beta in (0.0, 0.1, 0.2, 0.3, 0.4):
        model.beta = single.beta = beta
        optimizer.zero_grad()
        loss = single(x)
        loss.backward()
        assert relative(parallel(x), loss) <= TOLERANCE
        optimizer.step()
        assert relative(step(x), loss) <= TOLERANCE
    assert parallel.captures == step.captures == 3
    rank = distributed.get_rank()
    model.beta = 0.5 + rank
    for call in (parallel, step):
        said = refused(RuntimeError, lambda call=call: call(x))
        assert "the ranks make different calls" in said and "beta=0.5" in said and "beta=1.5" in said, said
    model.beta = single.beta = 0.75
    assert relative(parallel(x), single(x)) <= TOLERANCE


def values_that_differ() -> None:
    """At the first capture, and later: an error that names the value, on all ranks, and then they go on."""
    torch.manual_seed(0)
    rank = distributed.get_rank()
    model, x = Reader(), torch.randn(4, 4, dtype=d)
    model.beta, model.flag = 1.0 + rank, bool(rank)
    parallel = autopar.parallelize(model, Mesh(dp=2), outputs="global")
    said = refused(RuntimeError, lambda: parallel(x))
    assert said == (
        "forward reads values that differ between the ranks\n"
        "    beta: 1.0 on rank 0, 2.0 on rank 1\n    flag: False on rank 0, True on rank 1\n  set them alike on all "
        "ranks"
    ), said
    model.beta, model.flag = 1.0, False
    assert relative(parallel(x), model(x)) <= TOLERANCE
    if rank:
        parallel.which = 1
    said = refused(RuntimeError, lambda: parallel(x))
    assert (
        "the ranks make different calls" in said
        and "rank 1: call (x float64[4, 4]) in train where which is 1, it was 0, for the first time" in said
    ), said
    parallel.which = 0
    assert relative(parallel(x), model(x)) <= TOLERANCE
