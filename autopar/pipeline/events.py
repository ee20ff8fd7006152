"""Events: each slot waits for what the slot before it on its rank has recorded. Events of different ranks are unrelated.

The numbers are those of ONNX Runtime (pull request 4524): in a table of computations a slot has two of each, around its
receive and around its send; in a table with messages each of the three has a slot of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from autopar.errors import ScheduleError
from autopar.pipeline.task import Slot, Table


@dataclass(frozen=True)
class Events:
    """The events of one pass of one micro-batch through one stage; -1: none.

    Attributes:
        waited_before_recv, waited_after_recv, recorded_before_send, recorded_after_send: in ``compute_table``.
        recv_wait, recv_record, compute_wait, compute_record, send_wait, send_record: in ``compute_comm_table``.
    """

    waited_before_recv: int
    waited_after_recv: int
    recorded_before_send: int
    recorded_after_send: int
    recv_wait: int = -1
    recv_record: int = -1
    compute_wait: int = -1
    compute_record: int = -1
    send_wait: int = -1
    send_record: int = -1

    @property
    def compute(self) -> tuple[int, int, int, int]:
        """Those of ``compute_table``."""
        return astuple(self)[:4]

    @property
    def comm(self) -> tuple[int, int, int, int, int, int]:
        """Those of ``compute_comm_table``."""
        return astuple(self)[4:]


def with_events(rows: Sequence[Sequence[Slot]], each: int) -> Table:
    """The rows, with ``each`` events for each slot to wait for and to record; empty slots have none."""
    last = [(-1,) * each] * (len(rows[0]) if rows else 0)
    numbered = []
    for row in rows:
        new = []
        for rank, slot in enumerate(row):
            if slot.tasks:
                first = last[rank][-1] + 1
                slot = replace(slot, waits=last[rank], records=tuple(range(first, first + each)))
                last[rank] = slot.records
            new.append(slot)
        numbered.append(tuple(new))
    return tuple(numbered)


Index = dict[tuple[str, int, int], Slot]


def index(table: Table) -> Index:
    """The slot of each task: by kind, stage and micro-batch."""
    return {(task.kind, task.stage, task.batch): slot for row in table for slot in row for task in slot.tasks}


def events_of(batch: int, stage: int, of: str, computed: Index, communicated: Index) -> Events:
    if (slot := computed.get((f"{of}W", stage, batch))) is None:
        raise ScheduleError(f"the schedule has no {of}W{batch:02d} on stage {stage}; a pass is F (forward), B (backward) or W (weight gradient)")
    found = [*slot.waits, *slot.records]
    for action in "RWS":
        here = communicated.get((of + action, stage, batch))
        found += [*here.waits, *here.records] if here else [-1, -1]
    return Events(*found)
