"""Number the events of slots: each slot waits for the event of the slot before it on its rank.

Ranks have separate events. The numbers are those of ONNX Runtime (pull request 4524). In a table of computations a slot
has two events of each kind, around its receive and around its send; in a table with messages receive, computation and
send have slots of their own.
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
        """The events in ``compute_table``."""
        return astuple(self)[:4]

    @property
    def comm(self) -> tuple[int, int, int, int, int, int]:
        """The events in ``compute_comm_table``."""
        return astuple(self)[4:]


def with_events(rows: Sequence[Sequence[Slot]], each: int) -> Table:
    """Return the rows with ``each`` events to wait for and to record in each slot; empty slots have none."""
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
    """Return the slot of each task, by kind, stage and micro-batch."""
    return {(task.kind, task.stage, task.batch): slot for row in table for slot in row for task in slot.tasks}


def events_of(batch: int, stage: int, of: str, computed: Index, communicated: Index) -> Events:
    if (slot := computed.get((f"{of}W", stage, batch))) is None:
        raise ScheduleError(
            f"the schedule has no {of}W{batch:02d} on stage {stage}; a pass is F (forward), B (backward) or W (weight "
            f"gradient)"
        )
    events = [*slot.waits, *slot.records]
    for action in "RWS":
        slot_of_action = communicated.get((of + action, stage, batch))
        events += [*slot_of_action.waits, *slot_of_action.records] if slot_of_action else [-1, -1]
    return Events(*events)
