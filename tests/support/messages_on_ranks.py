"""On each rank of real processes: messages that are posted, launched and waited for by hand."""

from __future__ import annotations

import datetime

import pytest
import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.lowering.point_to_point import Handle, MessageEnd, start, under_way
from autopar.runtime.lowering.tags import PASSES, UNTAGGED, tag_of
from autopar.runtime.processes.groups import Key, process_groups

OTHER = {0: 1, 1: 0}
Groups = dict[str, str | None]


def groups() -> tuple[Groups, list[Key]]:
    """The default group, and two further ones of the same ranks."""
    taken: list[Key] = []
    made = process_groups().take_streams([((0, 1), "early"), ((0, 1), "late")], taken)
    return {"default": None, **{stream: group.group_name for (_, stream), group in made.items()}}, taken


def box(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.float32)


Ends = list[tuple[int, torch.Tensor]]  # the other rank of each message, and the memory


def launch(ends: Ends, group: str | None = None, tag: int = UNTAGGED) -> Handle:
    return start([MessageEnd(True, *end) for end in ends], group, tag)


def post(ends: Ends, group: str | None = None, tag: int = UNTAGGED) -> Handle:
    return start([MessageEnd(False, *end) for end in ends], group, tag)


def values(received: tuple[torch.Tensor, ...]) -> list[float]:
    return [float(one.unique()) for one in received]


def wait(handle: Handle) -> tuple[torch.Tensor, ...]:
    return handle.wait()


def both_ways(count: int) -> list[float]:
    """Receives are posted first and waited for last; all on all groups."""
    rank, found = distributed.get_rank(), []
    names, taken = groups()
    for name in names.values():
        posted = post([(OTHER[rank], torch.empty(4)) for _ in range(count)], name)
        sent = launch([(OTHER[rank], box(10 * rank + k)) for k in range(count)], name)
        assert set(under_way()) == {posted, sent}
        assert wait(sent) == ()
        found += values(wait(posted))
        assert not under_way()
    process_groups().release(taken)
    return found


def tags_in_any_order() -> list[float]:
    """Rank 0 sends in one order, rank 1 waits in the other; messages of one tag keep their order."""
    tags = [tag_of(boundary, during, batch) for boundary in (0, 7) for during in PASSES for batch in (0, 3)]
    found = []
    if distributed.get_rank() == 0:
        sent = [launch([(1, box(10 * k + again))], tag=tag) for again in (0, 1) for k, tag in enumerate(tags)]
        for one in reversed(sent):
            wait(one)
    else:
        for tag in reversed(tags):
            for _ in range(2):
                found += values(wait(post([(0, torch.empty(4))], tag=tag)))
    return found


def groups_have_their_own_tags() -> list[float]:
    """One tag on three groups, received in another order than sent."""
    names, taken = groups()
    found = []
    if distributed.get_rank() == 0:
        sent = [launch([(1, box(k))], names[name], 5) for k, name in enumerate(("late", "default", "early"))]
        for one in sent:
            wait(one)
    else:
        for name in ("early", "late", "default"):
            found += values(wait(post([(0, torch.empty(4))], names[name], 5)))
    process_groups().release(taken)
    return found


def nothing_is_kept(count: int) -> tuple[int, int]:
    """How many of the tensors that were sent and received are alive: before the wait, when the caller has let go of
    them and of the handles, and after."""
    rank, memory = distributed.get_rank(), []
    for k in range(count):
        messages = [MessageEnd(way, OTHER[rank], box(k, 1000)) for way in (True, False)]
        memory += [StorageWeakRef(one.memory.untyped_storage()) for one in messages]
        start(messages)
        del messages
    before = sum(not one.expired() for one in memory)
    for handle in under_way():
        wait(handle)
    return before, sum(not one.expired() for one in memory)


def once_only() -> None:
    rank = distributed.get_rank()
    handle: Handle = start([MessageEnd(True, OTHER[rank], box(1)), MessageEnd(False, OTHER[rank], torch.empty(4))])
    (received,) = wait(handle)
    assert handle.received == () and float(received[0]) == 1
    with pytest.raises(RuntimeError, match="these messages have been waited for; each handle is waited for once"):
        wait(handle)
    assert wait(start([])) == () and not under_way()


def a_short_message_leaves_a_tail() -> list[float]:
    """Why the sizes of both ends are compared before anything runs: gloo says nothing."""
    if distributed.get_rank() == 0:
        wait(launch([(1, box(1, 2))]))
        return []
    return wait(post([(0, box(9))]))[0].tolist()


def a_failed_wait_lets_go() -> None:
    """Nobody sends. The wait ends at the time-out of the group, and the handle with it."""
    group = distributed.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    assert isinstance(group, distributed.ProcessGroup)
    if distributed.get_rank() == 0:
        handle = post([(1, torch.empty(4))], group.group_name)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            wait(handle)
        assert not under_way()
        with pytest.raises(RuntimeError):  # the pair is closed: nothing can be received here again
            wait(post([(1, torch.empty(4))], group.group_name))
        assert not under_way()
    distributed.barrier()
    distributed.destroy_process_group(group)
