"""Define tasks, and slots of tasks, of which a schedule consists.

A task is one pass of one micro-batch through one stage, or one end of the message with its result. Its text is
ONNX Runtime's: ``FW00`` computes the forward of micro-batch 0, ``FS00`` sends its result, ``FR00`` receives it; ``BW``,
``BS``, ``BR`` do the same for the backward; ``WW`` computes the gradient of the weights. In a schedule without any
``WW``, ``BW`` computes both gradients. In a schedule with ``WW``, every ``BW`` computes only the gradient of the input;
if both are computed at once, the ``WW`` follows in the same slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Pass = Literal["F", "B", "W"]

PASSES: dict[Pass, str] = {"F": "forward", "B": "backward", "W": "weight gradient"}
KINDS = ("FW", "FS", "FR", "BW", "BS", "BR", "WW")  # pass and action

REDUCE, UNSHARD, RESHARD = "REDUCE_GRAD", "UNSHARD", "RESHARD"
ON_PARAMETERS = {
    REDUCE: "reduce the stage's gradients over the ranks that hold the same stage",
    UNSHARD: "gather the stage's parameters",
    RESHARD: "free what was gathered",
}


class Task(NamedTuple):
    """One pass of one micro-batch through one stage (action W), or one end of its message (S, R).

    Attributes:
        kind: ``FW FS FR BW BS BR WW``: pass and action.
        stage, batch: the stage that the task is on, also for a send or a receive; the micro-batch.
        peer: for a message, the stage at the other end.
    """

    kind: str
    stage: int
    batch: int
    peer: int = -1

    @property
    def of(self) -> str:
        """The pass: F, B or W."""
        return self.kind[0]

    @property
    def action(self) -> str:
        return self.kind[1]

    def __str__(self) -> str:
        return f"{self.kind}{self.batch:02d}"

    @property
    def where(self) -> str:
        """The task in words, as in errors."""
        if self.action == "W":
            return f"{self} of stage {self.stage}"
        return f"{self} of stage {self.stage} {'to' if self.action == 'S' else 'from'} stage {self.peer}"


def other_end(message: Task) -> Task:
    """Return the receive of a send, or the send of a receive."""
    return Task(message.kind[0] + ("R" if message.kind[1] == "S" else "S"), message.peer, message.batch, message.stage)


@dataclass(frozen=True, slots=True)
class Slot:
    """The tasks of a rank at one time. Its messages are launched together; then it computes, task after task.

    Attributes:
        tasks: in the order in which they are launched.
        free: sends whose buffers are released after the slot has waited for its messages, and before it computes.
        parameters: actions on all parameters of a stage, after the computations: a name of ``ON_PARAMETERS`` and the
            stage.
        waits, records: the events that the slot waits for and records, numbered for each rank. Only the derived tables
            of a ``PipelineSchedule`` have them.
    """

    tasks: tuple[Task, ...] = ()
    free: tuple[Task, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    waits: tuple[int, ...] = ()
    records: tuple[int, ...] = ()

    @property
    def compute(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.kind[1] == "W")

    @property
    def send(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.kind[1] == "S")

    @property
    def receive(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.kind[1] == "R")

    @property
    def messages(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.kind[1] != "W")

    def __bool__(self) -> bool:
        return bool(self.tasks or self.free or self.parameters)

    def __str__(self) -> str:
        return "".join(map(str, self.tasks)).ljust(8)


EMPTY = Slot()
Row = tuple[Slot, ...]
Table = tuple[Row, ...]


def placed(table: Sequence[Sequence[Slot]]) -> Iterator[tuple[int, int, Slot]]:
    """Yield each slot with its row and its rank, row by row."""
    for time, row in enumerate(table):
        for rank, slot in enumerate(row):
            yield time, rank, slot
