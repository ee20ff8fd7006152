"""Compare schedules with figures that are known: of PaddlePaddle's issues, and of ByteScheduler's example."""

from __future__ import annotations

import pytest

from autopar.scheduling import ByteScheduler, Line, Op, Part, schedule, simulate

WAITED = [
    Op("reduce", "dp", 4.0),
    Op("wait", "compute", 0.0, ("reduce",)),
    Op("first", "compute", 2.0),
    Op("second", "compute", 2.0),
]


def test_computation_first_is_twice_as_fast() -> None:
    """PaddlePaddle #47471."""
    assert schedule(WAITED, "communication-first").makespan == 8
    made = schedule(WAITED, "compute-first")
    assert (made.makespan, made.bound, made.ratio, made.exposed) == (4, 4, 1, 0)
    assert made.order == ("reduce", "first", "second", "wait")


def test_a_cpu_starts_first_and_waits_last() -> None:
    assert schedule(WAITED, issue="direct").order == ("reduce", "first", "second", "wait")
    assert schedule(WAITED, issue="direct").makespan == 4
    reduce, wait, first, second = ((Part(op.name, 0, 0),) for op in WAITED)
    late = [Line("compute", first), Line("compute", second), Line("start", reduce), Line("wait", reduce),
            Line("compute", wait)]  # fmt: skip
    assert simulate(WAITED, late, "direct").makespan == 8
    assert simulate(WAITED, late, "enqueue").makespan == 4


def test_what_communication_needs_goes_first() -> None:
    """PaddlePaddle #49561."""
    ops = [*(Op(f"op{i}", "compute", 2.0) for i in (1, 2, 3)), Op("comm", "dp", 4.0, ("op3",))]
    assert schedule(ops, "program").makespan == 10
    made = schedule(ops)
    assert made.makespan == made.bound == 6
    assert made.order[0] == "op3"


def contrived(streams: int, piece: int | None) -> list[Op]:
    """ByteScheduler's example: three layers of forward = backward = 2, and tensors of 3, 6 and 3.

    Args:
        streams: 2: a push and a pull; 1: an all-reduce.
        piece: the size of the pieces of tensors; ``None``: they are whole.
    """
    ops, read = [Op("backward3", "compute", 2.0)], {}
    ops += [Op(f"backward{layer}", "compute", 2.0, (f"backward{layer + 1}",)) for layer in (2, 1)]
    for layer, size in ((3, 3), (2, 6), (1, 3)):
        names = [f"{layer}.{k}" for k in range(size // (piece or size))]
        for name in names:
            seconds = size / len(names)
            ops.append(Op(f"push{name}", "push", seconds, (f"backward{layer}",), bytes=int(seconds)))
            if streams == 2:
                ops.append(Op(f"pull{name}", "pull", seconds, (f"push{name}",), bytes=int(seconds)))
        read[layer] = [f"{'pull' if streams == 2 else 'push'}{name}" for name in names]
    for layer in (1, 2, 3):
        before = f"forward{layer - 1}" if layer > 1 else "backward1"
        ops.append(Op(f"forward{layer}", "compute", 2.0, (before, *read[layer])))
    return ops


@pytest.mark.parametrize(("streams", "first", "then"), [(2, 26, 18), (1, 20, 17)])
def test_the_example_of_bytescheduler(streams: int, first: float, then: float) -> None:
    assert schedule(contrived(streams, None), "program").makespan == first
    for policy in (ByteScheduler(1, 1), ByteScheduler(1, 1, fused=False), "p3", "longest-tail"):
        made = schedule(contrived(streams, 1), policy)
        assert made.makespan == then
        assert made.bound == then


def test_an_all_reduce_is_cut_where_a_more_urgent_one_can_start() -> None:
    made = schedule(contrived(1, None))
    assert made.makespan == 17
    starts = [part for line in made.lines if line.kind == "start" for part in line.parts if part.op == "push2.0"]
    assert [part[1:] for part in starts] == [(0, 2), (2, 6)]
