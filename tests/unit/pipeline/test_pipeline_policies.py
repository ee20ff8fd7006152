"""The policies: torch's own orders, the published formulas, and sizes that a policy cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopar.pipeline
from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, PipelineSchedule, Task, build
from autopar.pipeline.policies import loop, named, vee
from autopar.pipeline.policies.blocks import block
from autopar.pipeline.policies.phases import order
from autopar.pipeline.simulate import Times


def orders(schedule: PipelineSchedule) -> list[list[str]]:
    """What each rank computes, as torch writes it."""
    split = any(task.kind == "WW" for _, _, task in schedule.tasks())
    found: list[list[str]] = [[] for _ in range(schedule.ranks)]
    for row in schedule.slots:
        for rank, slot in enumerate(row):
            words = []
            for task in slot.compute:
                together = split and {Task("BW", *task[1:3]), Task("WW", *task[1:3])} <= set(slot.tasks)
                if task.kind != "WW" or not together:
                    letter = (
                        "F"
                        if task.kind == "FW"
                        else "W"
                        if task.kind == "WW"
                        else "B"
                        if together or not split
                        else "I"
                    )
                    words.append(f"{task.stage}{letter}{task.batch}")
            if words:
                found[rank].append(words[0] if len(words) == 1 else f"({';'.join(words)})OVERLAP_F_B")
    return found


def torchs(kind: str, ranks: int, batches: int, chunks: int) -> list[list[str]]:
    made: Any = object.__new__(getattr(torch_schedules, kind))
    made.pp_group_size, made._n_microbatches, made._num_stages = ranks, batches, ranks * chunks
    made.num_stages, made.n_local_stages, made._stages, made.rank = ranks * chunks, chunks, [None] * chunks, 0
    made.number_of_rounds = max(1, batches // ranks)
    made.microbatches_per_round = batches // made.number_of_rounds
    return [[str(action) for action in made._calculate_single_rank_operations(rank) if action] for rank in range(ranks)]


@pytest.mark.long
@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 20), st.integers(1, 3))
def test_torchs_own_orders(ranks: int, batches: int, chunks: int) -> None:
    """Of the schedules that torch has too, where it has them."""
    assert orders(build("zb-v", ranks, batches, messages=False)) == torchs("ScheduleZBVZeroBubble", ranks, batches, 2)
    whole = batches * ranks
    assert orders(build("interleaved-1f1b", ranks, whole, chunks, messages=False)) == torchs(
        "ScheduleInterleaved1F1B", ranks, whole, chunks
    )
    enough = 2 * ranks + batches - 1
    assert orders(build("dualpipe-v", ranks, enough, messages=False)) == torchs("ScheduleDualPipeV", ranks, enough, 2)


def wraps(schedule: PipelineSchedule) -> list[Task]:
    """What waits for a message around the ring, but for the first micro-batch of each group of as many as there are
    ranks."""
    p, last = schedule.ranks, schedule.stages - 1
    return [
        task for _, _, task in schedule.tasks()
        if task.batch % p and ((task.kind == "FW" and task.stage and task.stage % p == 0)
                               or (task.kind == "BW" and task.stage % p == p - 1 != last))
    ]  # fmt: skip


# Zero Bubble (Qi et al. 2024): micro-batches; F, B, W, c in ms; chunks; 1F1B, 1F1B-I, that with every dependency,
# ZB-H1, ZB-H2
PUBLISHED = (
    (24, (18.522, 18.086, 9.337, 0.601), 3, (0.2431, 0.1055, 0.1090, 0.1585, 0.1083)),
    (32, (18.513, 18.086, 9.331, 0.626), 3, (0.1985, 0.0818, 0.0847, 0.1242, 0.0837)),
    (64, (18.546, 18.097, 9.321, 0.762), 3, (0.1240, 0.0443, 0.0461, 0.0674, 0.0444)),
    (24, (29.718, 29.444, 19.927, 0.527), 4, (0.2347, 0.0808, 0.0827, 0.1323, 0.0698)),
    (32, (29.802, 29.428, 19.530, 0.577), 4, (0.1898, 0.0628, 0.0644, 0.1045, 0.0559)),
    (64, (29.935, 29.621, 19.388, 0.535), 4, (0.1091, 0.0320, 0.0328, 0.0554, 0.0294)),
)


@pytest.mark.simulated
@pytest.mark.parametrize(("batches", "times", "chunks", "rates"), PUBLISHED)
def test_zero_bubbles_published_rates(
    batches: int, times: tuple[float, ...], chunks: int, rates: tuple[float, ...]
) -> None:
    """1F1B and ZB-H1 by makespan, ZB-H2 by the longest span. The published 1F1B-I leaves most waits around the ring
    out."""
    *whole, c = times
    interleaved = build("interleaved-1f1b", 8, batches, chunks)
    chunk = Times(*(time / chunks for time in whole), c)
    found = (
        build("1f1b", 8, batches).simulate(Times(*times)).bubble_rate,
        interleaved.simulate(chunk, at_once=wraps(interleaved)).bubble_rate,
        interleaved.simulate(chunk).bubble_rate,
        build("zb-h1", 8, batches).simulate(Times(*times)).bubble_rate,
        build("zb-h2", 8, batches).simulate(Times(*times)).span_bubble_rate,
    )
    assert tuple(round(rate, 4) for rate in found) == rates


@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 4), *[st.integers(1, 9)] * 3)
def test_bubbles_are_those_of_the_formulas(p: int, m: int, v: int, f: int, b: int, w: int) -> None:
    def run(policy: str, batches: int = m, chunks: int | None = None):
        return build(policy, p, batches, chunks).simulate(Times(f, b, w))

    for policy in ("gpipe", "1f1b", "eager-1f1b"):
        assert run(policy).bubble == (p - 1) * (f + b + w)
    assert run("interleaved-1f1b", m * p, v).bubble == (p - 1) * (f + b + w)  # the times are those of a chunk
    assert run("looped-bfs", m + p, v).bubble == (p - 1) * (f + b + w)
    if m >= p and w <= min(f, b):
        assert run("zb-h1").bubble == (p - 1) * (f + b - w)
    if m >= 2 * p - 1 and w <= min(f, b) and 2 * w <= f + b:
        assert run("zb-h2").span_bubble == (p - 1) * (f + b - 2 * w)
    if m >= 2 * p - 1 and f == b == w:
        assert run("zb-v").span_bubble == 0
    if m >= (p + 2) // 2 and f == b == w:  # in chunks, two a rank: half and two thirds of 1F1B's 6 (p - 1) f, nearly
        assert run("v-half").bubble == (3 * p - 4 if p > 2 else 3 * (p - 1)) * f
        assert run("v-min").bubble == (4 * p - 5 + 2 * (p % 3 == 0) if p > 1 else 0) * f


def test_the_building_blocks_of_the_memory_controlled() -> None:
    """No two passes of a rank on one unit; a rank's two stages keep a micro-batch for the same sum of units on all
    ranks."""
    for offsets, per_rank in (((1, 1, 1, 1), 4), ((1, 2, 1, 2), 6)):
        for p in range(1, 40):
            times = block(p, offsets)
            assert all(len({time % 6 for time in own}) == 4 and list(own) == sorted(own) for own in times)
            kept = {(home - first) + (loss - turn) for first, turn, loss, home in times}
            assert len(kept) == 1 and per_rank * (p - 1) <= kept.pop() <= per_rank * (p - 1) + 12
    assert block(6, (1, 1, 1, 1))[0] == (0, 11, 14, 25), "where p is a multiple of 3 the way back waits for two units"


def test_eager_1f1b_hides_transfers() -> None:
    times = Times(1, 1, 1, 0.2)
    exposed = {policy: sum(build(policy, 8, 32).simulate(times).exposed) for policy in ("1f1b", "eager-1f1b")}
    assert exposed["eager-1f1b"] < exposed["1f1b"] / 3


@pytest.mark.long
@settings(deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_any_number_of_micro_batches_and_chunks(policy: str, p: int, m: int, v: int) -> None:
    row = POLICIES[policy]
    assume(row.chunks is None or v in row.chunks)
    schedule = build(policy, p, m, v)
    assert (schedule.ranks, schedule.stages, schedule.batches, schedule.name) == (p, p * v, m, policy)
    assert schedule.verify().computations == p * v * m * (3 if row.split else 2)
    assert not any(schedule.verify().finishes.values()), "on all channels"


def test_where_stages_lie() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3, 2) == (0, 1, 2, 2, 1, 0)
    assert vee(2, 3) == (0, 1, 1, 0, 0, 1)
    schedule = build("zb-v", 2, 1)
    assert schedule.stages_of == ((0, 3), (1, 2)) and schedule.chunk_of(3) == 1 and schedule.chunks == 2


@pytest.mark.simulated
@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(POLICIES)), st.permutations(range(4)), st.integers(1, 6))
def test_ranks_may_be_numbered_otherwise(policy: str, order: list[int], m: int) -> None:
    schedule = build(policy, 4, m)
    rank_of = [order[rank] for rank in schedule.rank_of]
    other = build(policy, 4, m, rank_of=rank_of)
    assert other.rank_of == tuple(rank_of) and other.verify().computations == schedule.verify().computations
    assert [[row[order[rank]].compute for rank in range(4)] for row in other.compute_table] == [
        [slot.compute for slot in row] for row in schedule.compute_table
    ]
    assert other.simulate().makespan == schedule.simulate().makespan


def test_stages_share_ranks_as_the_policy_says() -> None:
    for rank_of in ((0, 1), (0, 1, 1), (0, 2, 1, 0), (0, 1, 2, 2, 1, 0, 0), (0, 1, 0, 2, 1, 2)):
        with pytest.raises(
            ScheduleError, match=r"zb-v cannot have its stages on ranks .*: they must be as in \(0, 1, 2, 2, 1, 0\)"
        ):
            build("zb-v", 3, 4, rank_of=rank_of)


def test_phases_repeat_passes_in_order() -> None:
    slots = order([(2, "F0 F1"), (1, "I1 (F0 B1)"), (5, "W"), (1, "I0")], (0, 3), 3, True)
    assert [str(slot).strip() for slot in slots] == [
        "FW00",
        "FW00",
        "FW01",
        "FW01",
        "BW00",
        "FW02BW01WW01",
        "WW00",
        "BW00",
        "WW00",
    ]


def test_the_page_names_every_policy() -> None:
    page = Path(autopar.pipeline.__file__).with_name("README.md").read_text()
    assert all(f"`{name}`" in page for name in POLICIES)


def test_names() -> None:
    for name, row in POLICIES.items():
        assert named(name) == name and all(named(alias) == name for alias in row.aliases)
    for torchs_name in (
        "GPipe",
        "1F1B",
        "Schedule1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "ZBVZeroBubble",
        "DualPipeV",
        "ScheduleGPipe",
    ):
        assert named(torchs_name) in POLICIES
    with pytest.raises(ScheduleError, match="no policy 'zb-h3'; did you mean 'zb-h"):
        build("zb-h3", 2, 2)


def test_sizes_that_a_policy_cannot_have() -> None:
    for arguments, text in (
        (("1f1b", 0, 4), "1f1b: ranks=0; there is at least one"),
        (("zb-v", 4, 0), "zb-v: batches=0"),
        (("zb-v", 4, 8, 3), "zb-v has 2 stages on a rank, not 3; interleaved-1f1b and looped-bfs have any number"),
        (("1f1b", 4, 8, 2), "1f1b has 1 stages on a rank, not 2"),
        (("interleaved", 4, 8, -1), "interleaved-1f1b: chunks=-1"),
    ):
        with pytest.raises(ScheduleError, match=text):
            build(*arguments)
    for wrong in (2.0, "2", True, None):
        with pytest.raises(TypeError, match="1f1b: ranks is a whole number, not"):
            build("1f1b", wrong, 4)
    with pytest.raises(TypeError, match="a policy is a name, such as '1f1b', not None"):
        build(None, 2, 2)
    with pytest.raises(ScheduleError, match="'optimised' is no policy of its own: call optimise"):
        build("optimised", 2, 2)
    assert build("1f1b", np.int64(2), np.int32(3)) == build("1f1b", 2, 3)
