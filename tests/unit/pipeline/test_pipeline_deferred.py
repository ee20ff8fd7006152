"""torch's schedules as a peer: with deferred receives some of them pair the wrong tensors, and the verifier says which.

``defer_pp_recv`` (torch 2.13) moves each receive to its reader. Between two ranks the i-th send and the i-th receive
may then no longer be the two ends of one message; messages have no tags, so gradients are wrong and nothing is raised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _add_reduce_grad, _add_send_recv

from autopar.errors import ScheduleError
from autopar.pipeline import PipelineSchedule, Slot, Task
from autopar.pipeline.policies import loop, vee
from autopar.pipeline.rows import rows

_defer_recv_ops = getattr(torch_schedules, "_defer_recv_ops", None)
if _defer_recv_ops is None:
    pytest.skip("this torch defers no receives", allow_module_level=True)

Actions = dict[int, list[Any]]  # rank → its actions
KINDS = {"F": "FW", "I": "BW", "B": "BW", "W": "WW", "SEND_F": "FS", "RECV_F": "FR", "SEND_B": "BS", "RECV_B": "BR"}
PEER = {"FS": 1, "FR": -1, "BS": -1, "BR": 1}

CLASSES: dict[str, tuple[Callable[[int, int], tuple[int, ...]], bool]] = {  # placement, whether deferral breaks some
    "ScheduleZBVZeroBubble": (vee, True),
    "ScheduleDualPipeV": (vee, True),
    "ScheduleInterleavedZeroBubble": (loop, True),
    "ScheduleInterleaved1F1B": (loop, False),
    "ScheduleLoopedBFS": (loop, False),
}


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Ranks, chunks, micro-batches."""
    for ranks in (2, 3, 4):
        for chunks in (2,) if CLASSES[name][0] is vee else (2, 3):
            for batches in (1, 2, 3, 4, 6, 8, 12):
                rounds = max(1, batches // ranks)
                if batches % rounds == 0 and (name != "ScheduleDualPipeV" or batches >= 2 * ranks):
                    yield ranks, chunks, batches


def actions(name: str, ranks: int, chunks: int, batches: int, *, deferred: bool) -> Actions:
    schedule = object.__new__(getattr(torch_schedules, name))
    rounds = max(1, batches // ranks)
    vars(schedule).update(
        pp_group_size=ranks, _n_microbatches=batches, _num_stages=ranks * chunks, num_stages=ranks * chunks,
        n_local_stages=chunks, rank=0, _stages=[None] * chunks, number_of_rounds=rounds,
        microbatches_per_round=batches // rounds,
    )  # fmt: skip
    rank_of = CLASSES[name][0](ranks, chunks)
    made = {rank: _add_reduce_grad(schedule._calculate_single_rank_operations(rank), batches) for rank in range(ranks)}
    made = _add_send_recv(made, rank_of.__getitem__, ranks * chunks)
    return _defer_recv_ops(made, rank_of.__getitem__) if deferred else made


def converted(made: Actions, rank_of: tuple[int, ...], batches: int) -> PipelineSchedule:
    """Each action as a slot of its own."""
    single = [part for own in made.values() for action in own for part in action.sub_actions or (action,)]
    split = any(action.computation_type.value == "W" for action in single)
    return PipelineSchedule(rows([list(_slots(made[rank], split)) for rank in sorted(made)], rank_of), batches, rank_of)


def _slots(own: list[Any], split: bool) -> Iterator[Slot]:
    for action in own:
        if action.computation_type.value == "WAIT_REDUCE_GRAD":  # of torch 2.15; it sends nothing
            continue
        if action.computation_type.value == "REDUCE_GRAD":
            yield Slot(parameters=(("REDUCE_GRAD", action.stage_index),))
            continue
        tasks = []
        for part in action.sub_actions or (action,):
            kind = KINDS[part.computation_type.value]
            tasks.append(
                Task(
                    kind, part.stage_index, part.microbatch_index, part.stage_index + PEER[kind] if kind in PEER else -1
                )
            )
            if split and part.computation_type.value == "B":
                tasks.append(Task("WW", part.stage_index, part.microbatch_index))
        yield Slot(tuple(tasks))


def mispaired(made: Actions, rank_of: tuple[int, ...]) -> bool:
    """Whether on some ordered pair of ranks the i-th send and the i-th receive are of different messages."""
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    received: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for rank, own in made.items():
        for action in own:
            kind = KINDS.get(action.computation_type.value)
            if kind in PEER:
                peer = action.stage_index + PEER[kind]
                if kind[1] == "S":
                    sent[rank, rank_of[peer]].append((kind[0], peer, action.microbatch_index))
                else:
                    received[rank_of[peer], rank].append((kind[0], action.stage_index, action.microbatch_index))
    return sent != received


@pytest.mark.simulated
@pytest.mark.parametrize("name", CLASSES)
def test_exactly_what_deferral_breaks_is_refused(name: str) -> None:
    broken = []
    for ranks, chunks, batches in sizes(name):
        rank_of = CLASSES[name][0](ranks, chunks)
        plain, deferred = (actions(name, ranks, chunks, batches, deferred=how) for how in (False, True))
        assert not mispaired(plain, rank_of)
        converted(plain, rank_of, batches).verify()
        schedule = converted(deferred, rank_of, batches)
        if mispaired(deferred, rank_of):
            broken.append((ranks, chunks, batches))
            with pytest.raises(
                ScheduleError,
                match=r"^message \d+ from rank \d to rank \d is not the same on both:\n  rank \d: send .S\d\d of "
                r"stage \d to \d\n      row",
            ):
                schedule.verify()
        else:
            schedule.verify()
    assert bool(broken) == CLASSES[name][1], broken
