"""On each rank of real processes: calls and steps in any order have the numbers of the order of ``today``."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping
from typing import Any

import loops
import pytest
import steps
import torch
from exchanges import groups
from model_cases import Made, differences, numbers
from random_models import random_case
from random_orders import by_chance, decided, in_order, order_of_today, random_order
from random_transfers import pieces_of, random_transfers, results_on_ranks
from torch import distributed

import autopar
from autopar import Mesh
from autopar.errors import AnomalyError, AutoparError
from autopar.ir.nodes import operands
from autopar.runtime.lowering.lower import lower
from autopar.scheduling import ByteScheduler
from autopar.scheduling.programs.order import OF_CALLS


def alike(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float) -> list[str]:
    """What differs: on two ranks in any bit, on more by more than rounding in float64."""
    if tolerance:
        return list(differences(ours, theirs, tolerance))
    return [what for what, value in theirs.items() if not same(ours[what], value)]


def same(a: Any, b: Any) -> bool:
    """Bit for bit, but all NaN are one."""
    if not isinstance(b, torch.Tensor):
        return a is b or a == b
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(0.125), b.nan_to_num(0.125))


def whole(found: Mapping[str, Any]) -> dict[str, Any]:
    return {what: loops.whole(value) if isinstance(value, torch.Tensor) else value for what, value in found.items()}


def random_calls(seeds: range, sizes: dict[str, int] | None = None) -> int:
    """Random models in random orders. Return how many were compared."""
    size, compared = distributed.get_world_size(), 0
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = random_case(random.Random(seed))
            if torch.tensor([*case.mesh.values()]).prod() != size:
                continue
            made = Made(case)
            try:
                numbers(made, model := made.model(), model)
            except Exception:
                continue  # it does not run on one device
            found = []
            try:
                for decide in (order_of_today, by_chance(seed)):
                    with decided(decide):
                        parallel = autopar.parallelize(
                            made.model(), Mesh(dict(case.mesh)), case.plan, **{**case.options, "outputs": "global"}
                        )
                        found.append(whole(numbers(made, parallel, parallel)))
                        parallel.close()
            except AutoparError:
                assert not found, seed  # it is refused in any order
                continue
        assert not (wrong := alike(found[1], found[0], 0.0 if size == 2 else 1e-12)), (seed, wrong)
        compared += 1
    return compared


def step_in(overlap: Any, name: str, sizes: dict[str, int], options: Mapping[str, Any], simulated: bool = False,
            count: int = 2) -> dict[str, Any]:  # fmt: skip
    """All numbers after some steps: losses, norms, parameters, buffers, states."""
    torch.manual_seed(0)
    make, batches, plan = steps.MODELS[name]
    low = "amp" in options
    parallel = autopar.parallelize(make().float() if low else make(), Mesh(sizes), plan if "tp" in sizes else "ddp")
    step = parallel.train_step(steps.adamw(parallel), overlap=overlap, **options)
    found: dict[str, Any] = {}
    for k in range(count):
        batch = steps.narrow(batches(k)) if low else batches(k)
        found[f"loss {k}"] = (step.simulate if simulated else step)(batch)
        found[f"norm {k}"] = step.grad_norm
    step.finish()
    found |= dict(parallel.named_parameters()) | dict(parallel.named_buffers())
    for k, state in step.optimizer.state_dict()["state"].items():
        found |= {f"{k}.{what}": value for what, value in state.items()}
    if "ema" in options:
        with step.averaged():
            found |= {f"average of {key}": p.detach().clone() for key, p in parallel.named_parameters()}
    found = {what: v.detach().clone() if isinstance(v, torch.Tensor) else v for what, v in whole(found).items()}
    parallel.close()
    return found


def steps_in_any_order(name: str, sizes: dict[str, int], options: Mapping[str, Any], overlaps: list[Any],
                       seeds: range = range(0)) -> None:  # fmt: skip
    """Under policies, and in random orders; beside ``today``, on processes and simulated."""
    size = distributed.get_world_size()
    tolerance = 0.0 if size == 2 else 1e-12
    today = step_in("today", name, sizes, options)
    for overlap in overlaps:
        found = step_in(overlap, name, sizes, options)
        assert not (wrong := alike(found, today, tolerance)), (overlap, wrong)
    for seed in seeds:
        with decided(by_chance(seed)):
            found = step_in("today", name, sizes, options)
        assert not (wrong := alike(found, today, tolerance)), (seed, wrong)


def transfers_in_any_order(sizes: dict[str, int], seeds: range) -> int:
    """Programs of transfers in random orders, lowered: bit for bit what simulated ranks hold. Return how many chunks
    there were."""
    rank, chunks = distributed.get_rank(), 0
    for seed in seeds:
        r = random.Random(seed)
        program = random_transfers(r, sizes)
        local = in_order(program, random_order(program, OF_CALLS, r))
        chunks += str(local[rank]).count(" from ")
        forward = lower(local[rank], groups(program.mesh))["forward"]
        own = pieces_of(program)[rank]
        found = forward.run([own[name] for name in forward.takes])
        wanted = results_on_ranks(program, local)[rank]
        for node, a, b in zip(operands(program.output), found, wanted, strict=True):
            assert a.shape == b.shape and same(a, b), (seed, node.name, a, b)
    return chunks


TINY = ByteScheduler(40, 100, fused=False)


def mlp(overlap: Any, **sizes: int) -> autopar.Parallel:
    torch.manual_seed(0)
    return autopar.parallelize(steps.MODELS["mlp"][0](), Mesh(sizes), "ddp", overlap=overlap)


def a_call_in_chunks() -> None:
    """Forward and backward, with several calls before the backwards."""
    batches = [steps.vectors(k) for k in range(2)]
    found = []
    for overlap in ("today", TINY, "longest-tail"):
        parallel = mlp(overlap, dp=2)
        losses = [parallel(**batch) for batch in batches]
        sum(losses).backward()  # type: ignore[union-attr]
        found.append(whole({**dict(enumerate(losses)), **{n: p.grad for n, p in parallel.named_parameters()}}))
        if overlap is TINY:
            text = str(parallel.local(distributed.get_rank()))
            assert text.count(" from ") > 20 and "join_chunks(" in text
        parallel.close()
    assert not alike(found[1], found[0], 0.0) and not alike(found[2], found[0], 0.0)


def nan_in_a_chunk() -> None:
    """Anomaly detection follows values through chunks and messages; the op that made the first NaN is named."""
    for overlap in (TINY, ByteScheduler(64, 256)):
        parallel = mlp(overlap, dp=2)
        step = parallel.train_step(steps.adamw(parallel), overlap=overlap, zero=1)
        x = steps.vectors(0)["x"]
        with torch.autograd.set_detect_anomaly(True):
            step(x)
            with torch.no_grad():
                x[:, 0] = math.nan  # on both ranks: one that fails ends the other
            with pytest.raises(AnomalyError, match=r"the input x|x has NaN|x : f64\[6 8\] = input"):
                step(x)
        parallel.close()


def two_models() -> None:
    """On one mesh, in two orders; their calls alternate."""
    first, second = mlp(TINY, dp=2), mlp("longest-tail", dp=2)
    ours = [one.train_step(steps.adamw(one), overlap=o, zero=1) for one, o in ((first, TINY), (second, "longest-tail"))]
    for k in range(3):
        a, b = (step(steps.vectors(k)["x"]) for step in ours)
        assert torch.equal(a, b)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(loops.whole(p), loops.whole(q))
    first.close()
    second.close()


def other_orders_on_one_rank() -> None:
    """All ranks are told, and none hangs."""
    rank = distributed.get_rank()
    parallel = mlp("today" if rank else "program", dp=2)
    with pytest.raises(RuntimeError, match="the ranks"):
        parallel(**steps.vectors(0)).backward()
    parallel.close()
    parallel = mlp("today", dp=2)
    step = parallel.train_step(steps.adamw(parallel), overlap=TINY if rank else "ddp")
    with pytest.raises(RuntimeError, match="the ranks"):
        step(steps.vectors(0)["x"])
    parallel.close()
