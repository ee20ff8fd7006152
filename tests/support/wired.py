"""What is done on real processes whose groups are on an emulated wire."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import signal
import tempfile
import weakref
from collections import Counter
from typing import Any

import pytest
import steps
import torch
from equality import relative
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar import Mesh
from autopar.runtime.wire.clock import now
from autopar.runtime.wire.emulate import Wire, present
from autopar.runtime.wire.prices import machine_of, seconds
from autopar.runtime.wire.wire_groups import BACKEND, WIRE_GROUPS, backend_of, completes_in_order

LATENCY, BANDWIDTH = 2e-3, 1e8
LONG = 0.25  # seconds, against which the work of a test is short


def fast() -> None:
    autopar.emulate(LATENCY, BANDWIDTH)


def slow() -> None:
    """Transfers are long, and groups do not share links."""
    autopar.emulate(LONG, BANDWIDTH, "axis")


def slow_ranks() -> None:
    """Transfers are long, and all groups of a rank share one link."""
    autopar.emulate(LONG, BANDWIDTH)


def wire() -> Wire:
    found = present()
    assert found is not None
    return found


def price(form: str, size: int, ranks: int | None = None) -> float:
    return seconds(form, size, ranks or distributed.get_world_size(), machine_of(LATENCY, BANDWIDTH))


# -- times ------------------------------------------------------------------------------------------------------------


def agreed_times(records: list[Any]) -> None:
    """All members say the same of when transfers begin and end, and they come in order."""
    told: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, [(one.bytes, one.begin, one.end) for one in records])
    assert all(one == told[0] for one in told)
    assert all(before.end <= after.begin for before, after in itertools.pairwise(records))


def times_of_a_group() -> None:
    wire().reset()
    sizes = [100_000, 3, 50_000, 7]
    works = [distributed.all_reduce(torch.ones(size), async_op=True) for size in sizes]
    done = list[int]()
    futures = [work.get_future() for work in works]
    for k, future in enumerate(futures):
        future.add_done_callback(lambda _, k=k: done.append(k))
    completed, asked = works[-1].is_completed(), now()
    torch.futures.collect_all(futures).wait()
    records = wire().records
    assert not completed or asked >= records[-1].end  # a loaded machine may ask late
    assert now() >= records[-1].end
    for work in works:
        work.wait()
        assert work.is_completed()
    assert done == [0, 1, 2, 3]
    assert [one.bytes for one in records] == [4 * size for size in sizes]
    for one, size in zip(records, sizes, strict=True):
        assert one.end - one.begin == pytest.approx(price("all_reduce", 4 * size), rel=1e-6)
    assert wire().report().charged == pytest.approx(sum(one.end - one.begin for one in records))
    agreed_times(records)


def two_groups_at_once(shared: bool) -> None:
    """Two groups of the same ranks: they share links, or run at the same time."""
    other = distributed.new_group()
    wire().reset()
    works = [distributed.all_reduce(torch.ones(3), group=group, async_op=True) for group in (None, other)]
    for work in works:
        work.wait()
    first, second = wire().records[:2]
    assert (second.begin >= first.end) == shared, (first, second)
    distributed.destroy_process_group(other)


def ways_of_a_link() -> None:
    """Messages in both directions travel at the same time, two in one direction and a collective after each other."""
    rank = distributed.get_rank()
    wire().reset()
    sent, received = torch.ones(3), torch.empty(2, 3)
    works = [distributed.isend(sent, 1 - rank)]
    works += [distributed.irecv(received[0], 1 - rank)]
    if rank == 0:
        works.append(distributed.isend(sent, 1, tag=1))
    else:
        works.append(distributed.irecv(received[1], 0, tag=1))
    for work in works:
        work.wait()
    distributed.all_reduce(torch.ones(3))
    *both, third, fourth = wire().records
    assert len(both) == 2 and both[0].end > both[1].begin, both
    assert third.name in ("send", "recv") and third.begin >= both[0].end, (third, both)
    assert fourth.begin >= third.end and fourth.begin >= both[1].end


def a_small_one_waits_for_an_earlier_one() -> None:
    """Within a group the first ends first, also where the caller waits in another order."""
    wire().reset()
    big = distributed.all_reduce(torch.ones(200_000), async_op=True)
    distributed.all_reduce(torch.ones(1), async_op=True).wait()
    assert big.is_completed()


def messages() -> None:
    """Tags in another order; a receive from any rank; batches; both ranks see one transfer."""
    rank = distributed.get_rank()
    a, b = torch.full((1000,), 1.0), torch.full((10,), 2.0)
    wire().reset()
    if rank == 0:
        works = [distributed.isend(a, 1, tag=5), distributed.isend(b, 1, tag=6)]
        for work in works:
            work.wait()
    else:
        second, first = torch.empty(10), torch.empty(1000)
        works = [distributed.irecv(second, 0, tag=6), distributed.irecv(first, 0, tag=5)]
        for work, size in zip(works, (40, 4000), strict=True):
            completed, asked = work.is_completed(), now()
            work.wait()
            assert work.is_completed()
            assert not completed or asked >= next(one.end for one in wire().records if one.bytes == size)
        assert torch.equal(first, a)
        assert torch.equal(second, b)
    records = {one.bytes: one for one in wire().records}
    assert records[4000].end - records[4000].begin == pytest.approx(LATENCY + 4000 / BANDWIDTH, rel=1e-6)
    assert now() >= max(one.end for one in records.values())
    told: list[Any] = [None, None]
    distributed.all_gather_object(told, {size: one[3:5] for size, one in records.items()})
    assert told[0] == told[1]
    wire().reset()
    under_way = [torch.full((2,), float(k)) if rank == 0 else torch.empty(2) for k in range(2)]
    for work in [distributed.isend(x, 1, tag=9) if rank == 0 else distributed.irecv(x, 0, tag=9) for x in under_way]:
        work.wait()
    assert [x.tolist() for x in under_way] == [[0.0] * 2, [1.0] * 2]
    assert len({one.begin for one in wire().records}) == 2  # two transfers
    for k in range(3):  # with one tag, in order
        x = torch.full((4,), float(k))
        if rank == 0:
            distributed.send(x, 1)
        else:
            got = torch.empty(4)
            assert distributed.recv(got) == 0
            assert torch.equal(got, x)
    mine, theirs = torch.full((5,), float(rank)), torch.empty(5)
    for work in distributed.batch_isend_irecv(
        [distributed.P2POp(distributed.isend, mine, 1 - rank), distributed.P2POp(distributed.irecv, theirs, 1 - rank)]
    ):
        work.wait()
    assert torch.equal(theirs, torch.full((5,), 1.0 - rank))


# -- systems ----------------------------------------------------------------------------------------------------------


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def distributed_data_parallel() -> None:
    """The backward ends no earlier than its gradients, and the gradients are the means."""
    model = DistributedDataParallel(_model())
    alone = _model()
    x = torch.arange(64.0).reshape(2, 32)
    wire().reset()
    model(x + distributed.get_rank()).square().sum().backward()
    records = wire().records
    size = sum(4 * one.numel() for one in model.parameters())
    assert [(one.name, one.bytes) for one in records] == [("allreduce", size)]
    assert now() >= records[-1].end
    assert records[-1].end - records[-1].begin == pytest.approx(price("all_reduce", size), rel=1e-6)
    for rank in range(distributed.get_world_size()):
        (alone(x + rank).square().sum() / distributed.get_world_size()).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert relative(mine.grad, theirs.grad) <= 1e-5


def fully_sharded() -> None:
    """FSDP2 gathers parameters and scatters gradients over the wire, each as what it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    wire().reset()
    model(torch.ones(2, 32)).clone().square().sum().backward()
    records = wire().records
    kinds = {one.name for one in records}
    assert kinds == {"all_gather_single", "reduce_scatter_single"}, kinds
    size = sum(4 * one.numel() for one in _model().parameters())
    assert all(one.bytes == size for one in records)
    assert now() >= records[-1].end
    for one in records:
        form = "all_gather" if one.name == "all_gather_single" else "reduce_scatter"
        assert one.end - one.begin == pytest.approx(price(form, size), rel=1e-6)


def own_step() -> None:
    """A step of autopar with ZeRO has the numbers of one device; its scatters are charged as such."""
    make, batches, _ = steps.MODELS["mlp"]
    model = make()
    alone = copy.deepcopy(model)
    ranks = distributed.get_world_size()
    parallel = autopar.parallelize(model, Mesh(dp=ranks), "ddp")
    step = parallel.train_step(steps.adamw(parallel), zero=2)
    single = steps.Single(alone, steps.adamw(alone))
    for k in range(3):
        wire().reset()
        assert relative(step(batches(k)["x"]), single(**batches(k))[0]) <= 1e-12
    parallel.state_dict()
    names = Counter(one.name for one in wire().records)
    assert names["reduce_scatter"] == 1, names  # the gradients, in one bucket
    scattered = next(one for one in wire().records if one.name == "reduce_scatter")
    assert scattered.bytes == sum(8 * one.numel() for one in alone.parameters())
    assert scattered.end - scattered.begin == pytest.approx(price("reduce_scatter", scattered.bytes), rel=1e-6)
    assert set(names) <= {"reduce_scatter", "all_gather_single", "allreduce"}, names  # and no control messages
    assert max(steps.differences(step, single).values()) <= 1e-9
    parallel.close()


def killed_rank(how: str) -> None:
    """A rank is killed while another one waits for it: an error, as with gloo."""
    distributed.barrier()  # all links of the group are there
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(4)
    with pytest.raises(RuntimeError):
        if how == "wait":
            distributed.all_reduce(x)
        elif how == "future":
            distributed.all_reduce(x, async_op=True).get_future().wait()
        elif how == "receive":
            distributed.recv(x, 1)
        else:
            DistributedDataParallel(_model())


def in_order() -> None:
    group = distributed.group.WORLD
    assert group is not None
    assert backend_of(group, "cpu") == BACKEND and completes_in_order(group.group_name, BACKEND)
    gloo = distributed.new_group(backend="gloo")
    assert not completes_in_order(gloo.group_name, backend_of(gloo, "cpu"))
    distributed.destroy_process_group(gloo)
    assert BACKEND in distributed.get_backend_config()


def nothing_is_kept() -> None:
    """Tensors are freed when their operation is over, without the garbage collector."""
    gc.disable()
    try:
        for _ in range(3):
            x, y = torch.ones(1000), torch.ones(1000)
            work = distributed.all_reduce(x, async_op=True)
            future = work.get_future()
            future.wait()
            work.wait()
            message = distributed.isend(y, 1) if distributed.get_rank() == 0 else distributed.irecv(y, 0)
            message.wait()
            references = [weakref.ref(x), weakref.ref(y)]
            del x, y, work, future, message
            distributed.all_reduce(torch.ones(1))  # the thread of the last one has gone on
            assert [one() for one in references] == [None, None]
    finally:
        gc.enable()


def again_after_destroy() -> None:
    """Another default group has another table; a destroyed one leaves nothing."""
    store = f"{tempfile.gettempdir()}/{wire_name()}"
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    opened = list[int]()
    for _ in range(3):
        distributed.destroy_process_group()
        assert WIRE_GROUPS == {}
        distributed.init_process_group(init_method=f"file://{store}", rank=rank, world_size=ranks)
        wire().reset()
        x = torch.ones(3)
        distributed.all_reduce(x)
        assert x.tolist() == [ranks] * 3
        assert len(wire().records) == 1
        store += "-again"
        gc.collect()
        opened.append(_open_files())
    assert opened[1] == opened[2]  # meshes of earlier tests may keep the first group


def _open_files() -> int:
    """How many files of wires this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("autopar_wire" in os.readlink(link) for link in links if os.path.islink(link))


def wire_name() -> str:
    """Return a name that all ranks know, and no other test."""
    name = [f"autopar-test-{os.getpid()}"]
    distributed.broadcast_object_list(name, 0)
    return name[0]
