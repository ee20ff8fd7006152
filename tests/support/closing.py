"""On each rank of real processes: process groups that meshes share, and that models close."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar
from autopar import Mesh, Parallel
from autopar.runtime.processes.groups import process_groups

PLAN = {"0.weight": ("tp", None), "0.bias": ("tp",), "2.weight": (None, "tp")}
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def of_their_own() -> None:
    """Prepare ranks that no other file of tests uses: models that others leave open have groups, too."""


def threads() -> set[str]:
    """The threads of gloo's groups. Others, such as Inductor's, do not count, because they may end at any time."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if "gloo" in (task / "comm").read_text():
                found.add(task.name)
    return found


def have_ended(those: set[str]) -> bool:
    """Whether threads end. They do so a moment after their group was closed."""
    for _ in range(80):
        if not those & threads():
            return True
        time.sleep(0.25)
    return False


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def on(**sizes: int) -> Parallel:
    return autopar.parallelize(model(), Mesh(**sizes), PLAN, outputs="global")


def same_numbers(parallel: Parallel) -> None:
    torch.testing.assert_close(parallel(X), model()(X))


def shared() -> None:
    """Meshes with the same sets of ranks have the groups of one, and the threads of one."""
    first = on(dp=2, tp=2)
    same_numbers(first)
    groups, before = len(process_groups()), threads()
    models = [on(**sizes) for sizes in ({"dp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"tp": 2, "dp": 2})]
    for parallel in models:
        same_numbers(parallel)
    assert len(process_groups()) == groups and threads() <= before
    assert first.job is not None and first.job.control.group_name not in first.job.groups.values()
    for parallel in models:
        assert parallel.job is not None
        assert {frozenset(ranks): name for ranks, name in parallel.job.groups.items()} == {
            frozenset(r): n for r, n in first.job.groups.items()
        }
        assert all(
            parallel.job.device_mesh.get_group(axis).group_name in parallel.job.groups.values()
            for axis in parallel.mesh.names
        )
    for parallel in (first, *models):
        parallel.close()


def last_one_closes() -> None:
    """Of two models, a copy and another mesh; threads end although DTensors keep the mesh."""
    warm = on(dp=2, tp=2)  # of the process, not of its groups: autograd's threads and the like
    same_numbers(warm)
    warm.close()
    del warm
    gc.collect()  # models of tests before this one, whose groups would be closed in between
    groups, before = len(process_groups()), threads()
    first, other = on(tp=2, cp=2, outer=1), on(tp=4)
    second = copy.deepcopy(first)
    state = first.state_dict()
    for parallel in (first, second, other):
        same_numbers(parallel)
    added = threads() - before
    assert len(process_groups()) > groups and added
    for closed, still in ((first, second), (second, other)):
        closed.close()
        closed.close()
        same_numbers(still)
        with pytest.raises(RuntimeError, match=r"this model is closed.*call parallelize again"):
            closed(X)
    other.close()
    assert len(process_groups()) == groups and have_ended(added)
    assert isinstance(state["0.weight"], DTensor)


def everything_is_refused_after_close(folder: str) -> None:
    parallel = on(tp=4)
    same_numbers(parallel)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    parallel.close()
    calls = [lambda: parallel(X), lambda: parallel.capture(X), lambda: step(X), lambda: step.capture(X),
             lambda: copy.deepcopy(parallel), lambda: parallel.load_state_dict(model().state_dict()),
             parallel.initialize, lambda: parallel.load_weights(folder)]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="this model is closed"):
            call()
    assert str(parallel.program) and len(list(parallel.parameters())) == 4, "what needs no other rank can be read"


def again_after_close() -> None:
    """DTensor remembers what an op returns on an equal mesh; that mesh's groups are gone."""
    for _ in range(3):
        parallel = on(cp=2, tp=2)
        same_numbers(parallel)
        weight = parallel.get_parameter("0.weight")
        torch.testing.assert_close((weight + weight).sum().full_tensor(), 2 * model().get_parameter("0.weight").sum())
        parallel.close()


def many_times() -> None:
    """No rank closes what another still reads."""
    before = threads()
    for _ in range(15):
        with contextlib.closing(on(tp=2, dp=2)) as parallel:
            same_numbers(parallel)
    assert have_ended(threads() - before)


def one_closes_another_calls() -> None:
    parallel = on(tp=4)
    same_numbers(parallel)
    with pytest.raises(RuntimeError, match=r"the ranks make different calls\n(.*\n)*.*rank 1: close the model"):
        parallel.close() if distributed.get_rank() == 1 else parallel(X)
    same_numbers(parallel)
    parallel.close()


def meshes_in_different_orders() -> None:
    """A rank would wait forever for the others to make its groups, or to take part in what follows where it has
    them."""
    known = on(dp=2, tp=2)
    for here, others in (({"tp": 2, "cp": 2}, {"tp": 4}), ({"dp": 2, "tp": 2}, {"tp": 2, "cp": 2})):
        groups = len(process_groups())
        with pytest.raises(
            RuntimeError,
            match=rf"the ranks make different calls\n(.*\n)*.*rank 1: parallelize on {re.escape(repr(Mesh(here)))}",
        ):
            on(**(here if distributed.get_rank() == 1 else others))
        assert len(process_groups()) == groups
    same_numbers(known)
    same_numbers(on(tp=2, cp=2))


def closed_while_an_exception_is_handled() -> None:
    """The others are in the middle of something: nobody is waited for."""
    parallel = on(tp=4)
    same_numbers(parallel)
    if distributed.get_rank() == 1:
        with pytest.raises(ZeroDivisionError), contextlib.closing(parallel):
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="this model is closed"):
            parallel(X)
    distributed.barrier()
    # the others too: then all ranks know the same groups
    with contextlib.suppress(ZeroDivisionError), contextlib.closing(parallel):
        raise ZeroDivisionError


def groups_of_the_user() -> None:
    """Of his DeviceMesh, and the default group: they stay."""
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = distribute_tensor(torch.arange(8.0), theirs, [Shard(0), Shard(0)])
    parallel = autopar.parallelize(model(), theirs, PLAN, outputs="global")
    same_numbers(parallel)
    parallel.close()
    assert value.full_tensor().tolist() == list(range(8))
    distributed.barrier()


def saved_in_a_thread(folder: str) -> None:
    """The group of such saves is not that of a model, and stays when it is closed."""
    parallel = on(dp=2, tp=2)
    same_numbers(parallel)
    saving = autopar.checkpoint.async_save(Path(folder), {"weight": parallel.get_parameter("0.weight")})
    parallel.close()
    same_numbers(other := on(dp=2, tp=2))
    assert saving.result().exists()
    other.close()
