"""Make ONNX Runtime's schedule (pull request 4524): micro-batch after micro-batch, each pass in the first free slot."""

from __future__ import annotations

from autopar.pipeline.task import EMPTY, Slot, Table, Task


def greedy(stages: int, batches: int) -> Table:
    """Return 2S + 2(B - 1) rows.

    At no time are more than S micro-batches between their first forward and their last backward.
    """
    times = 2 * stages + 2 * (batches - 1)
    table = [[EMPTY] * stages for _ in range(times)]
    live = [0] * times
    previous = [-1] * stages

    def first(stage: int, after: int) -> int:
        return next(t for t in range(after + 1, times) if table[t][stage] is EMPTY and live[t] < stages)

    for batch in range(batches):
        forward: list[int] = []
        for stage in range(stages):
            forward.append(first(stage, max(previous[stage], forward[-1] if forward else -1)))
            table[forward[-1]][stage] = Slot((Task("FW", stage, batch),))
        time = -1
        for stage in reversed(range(stages)):
            time = first(stage, max(forward[stage], time))
            table[time][stage] = Slot((Task("BW", stage, batch),))
        for t in range(forward[0], time + 1):
            live[t] += 1
        previous = forward
    return tuple(map(tuple, table))
