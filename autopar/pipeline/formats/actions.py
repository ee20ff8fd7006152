"""Write and read a schedule as the CSV of torch.distributed.pipelining: a line a rank, an action a cell.

The format is that of torch 2.13.

    0F0,0F1,0B0,,0B1        columns are times, and an empty cell is a bubble
    0F0,0SEND_F0,0F1,…      with messages: in the order in which they are launched

``2F0`` is the forward of micro-batch 0 on stage 2. ``B`` is a backward, ``I`` the gradient of the input alone, which
leaves that of the weights to a later ``W``. ``(0F1;3B0)OVERLAP_F_B`` is a forward and a backward at once. ``3SEND_F1``
and ``3SEND_B1`` go from stage 3 to the next stage and to the one before, ``RECV`` comes from there. ``1REDUCE_GRAD``,
``UNSHARD`` and ``RESHARD`` have no micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from autopar.errors import ScheduleError
from autopar.pipeline.lowering import lower, with_messages
from autopar.pipeline.rows import needs, rows
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.shape import whole
from autopar.pipeline.task import EMPTY, ON_PARAMETERS, Slot, Table, Task, placed

KIND_OF = {"F": "FW", "I": "BW", "B": "BW", "W": "WW", "SEND_F": "FS", "RECV_F": "FR", "SEND_B": "BS", "RECV_B": "BR"}
NAME_OF = {kind: name for name, kind in KIND_OF.items()}  # B, or I in a schedule that is split
COMPUTATIONS = {"F", "I", "B", "W"}
PEER = {"FS": 1, "FR": -1, "BS": -1, "BR": 1}  # message → the distance to the stage at its other end
OVERLAP = "OVERLAP_F_B"
NO_ACTION = (
    "there is no such action; write stage, action and micro-batch with numbers from 0, as in 2F0, 2I0, 2B0, 2W0, "
    "1SEND_F0, 2RECV_F0, 2SEND_B0, 1RECV_B0, or 2REDUCE_GRAD, 2UNSHARD, 2RESHARD, or (0F1;3B0)OVERLAP_F_B"
)


# -- writing -----------------------------------------------------------------------------------------------------------


def to_csv(schedule: ScheduleTable, *, messages: bool = False) -> str:
    """Return the CSV, with ``\\n`` at the end of each line.

    Args:
        messages: whether to write messages and actions on parameters too (torch: ``format="compute_comms"``), or only
            the computations, with one column for each time (``format="compute_only"``).

    Raises:
        ScheduleError: a message goes to a stage that is no neighbour; torch has no action for it.
    """
    split = schedule.is_split
    if messages:
        slots = with_messages(schedule).slots
        lines = [[cell for row in slots for cell in _cells(row[rank], split)] for rank in range(schedule.ranks)]
    else:
        lines = [[] for _ in range(schedule.ranks)]
        for row in schedule.compute_table if schedule.has_messages else schedule.slots:
            cells = [_computations(slot, split) for slot in row]
            width = max([1, *map(len, cells)])
            for line, rank_cells in zip(lines, cells, strict=True):
                line += rank_cells + [""] * (width - len(rank_cells))
    return "".join(",".join(line).rstrip(",") + "\n" for line in lines)


def _cells(slot: Slot, split: bool) -> list[str]:
    for task in slot.messages:
        if task.peer != task.stage + PEER[task.kind]:
            raise ScheduleError(
                f"{task.where}: torch's actions have messages between neighbouring stages alone; keep it as JSON"
            )
    messages = [_action(task, split) for task in slot.messages]
    return [*messages, *_computations(slot, split), *(f"{stage}{name}" for name, stage in slot.parameters)]


def _computations(slot: Slot, split: bool) -> list[str]:
    """Return the actions: one for two consecutive halves of a backward, and one for a forward with a whole backward."""
    actions: list[str] = []
    names = ""
    behind = None
    for task in slot.compute:
        if task.kind == "WW" and behind == Task("BW", task.stage, task.batch):
            actions[-1], names = f"{task.stage}B{task.batch}", names[:-1] + "B"
        else:
            actions.append(_action(task, split))
            names += _name(task, split)
        behind = task
    return [f"({';'.join(actions)}){OVERLAP}"] if names in ("FB", "BF") else actions


def _name(task: Task, split: bool) -> str:
    return "I" if split and task.kind == "BW" else NAME_OF[task.kind]


def _action(task: Task, split: bool) -> str:
    return f"{task.stage}{_name(task, split)}{task.batch}"


# -- reading -----------------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """One action and its position in the text.

    Attributes:
        name: a key of ``KIND_OF`` or ``ON_PARAMETERS``.
        batch: -1 if it has none.
        line, column: from 1.
    """

    text: str
    name: str
    stage: int
    batch: int
    line: int
    column: int

    def refuse(self, reason: str) -> NoReturn:
        _refuse(self.line, self.column, self.text, reason)

    @property
    def task(self) -> Task:
        kind = KIND_OF[self.name]
        return Task(kind, self.stage, self.batch, self.stage + PEER[kind] if kind in PEER else -1)


Cell = tuple[Action, ...]  # empty for a bubble, two actions if they overlap

_CELL = re.compile(r'"((?:[^"]|"")*)"(?=,|\Z)|([^,]*)')
_ACTION = re.compile(rf"([0-9]{{1,9}})(?:({'|'.join(KIND_OF)})([0-9]{{1,9}})|({'|'.join(ON_PARAMETERS)}))")
_OVERLAPPED = re.compile(rf"\(([^()]*)\){OVERLAP}")


def from_csv(
    text: str,
    make: Callable[..., Schedule],
    *,
    batches: int | None = None,
    ranks: int | None = None,
    recompute: bool = False,
) -> Schedule:
    """Return the schedule of a CSV, with messages or without.

    If every computation comes after those that it reads, the columns of computations are the rows of the schedule.
    Otherwise, and with messages, each action is in the first row that its rank's order allows. A CSV without messages,
    but with actions on parameters, gets messages.

    Args:
        make: the class of the schedule.
        batches: the number of micro-batches; default: the largest number in the text, plus one.
        ranks: the number of lines that the text must have; default: any number.
        recompute: whether a backward runs its forward again, which a CSV does not show.

    Raises:
        ScheduleError: an action cannot be read (with line and column); a stage is on two ranks, or stages are not
            numbered from 0 without gaps; a backward contradicts the weight gradients; ranks wait for each other for
            ever.
    """
    if not isinstance(text, str):
        raise TypeError(f"a CSV is a text, not {text!r:.80}; read a file with PipelineSchedule.load(path)")
    lines = [
        [_read(cell, number, column) for column, cell in _split(line)] for number, line in enumerate(_lines(text), 1)
    ]
    if ranks is not None and len(lines) != whole(ranks, "ranks"):
        raise ScheduleError(f"there are {len(lines)} lines, one for each rank, but there must be {ranks} ranks")
    actions = [action for line in lines for cell in line for action in cell]
    rank_of = _placement(lines)
    batches = _batches(actions) if batches is None else whole(batches, "batches")
    if batches < 1:
        raise ScheduleError(f"batches={batches}; there is at least one micro-batch")
    _check(actions, batches, len(rank_of))
    names = {action.name for action in actions}
    split = "W" in names
    if names <= COMPUTATIONS:
        width = max(map(len, lines))
        columns = [[_slot(cell, split) for cell in line] + [EMPTY] * (width - len(line)) for line in lines]
        table = tuple(zip(*columns, strict=True))
        if _in_time(table, rank_of):
            return make(table, batches, rank_of, recompute=recompute)
    schedule = make(rows([_order(line, split) for line in lines], rank_of), batches, rank_of, recompute=recompute)
    silent = len(lines) > 1 and names <= COMPUTATIONS | ON_PARAMETERS.keys()
    return lower(schedule) if silent else schedule


def _refuse(line: int, column: int, text: str, reason: str) -> NoReturn:
    raise ScheduleError(f"line {line}, column {column}: {text if len(text) <= 40 else text[:37] + '...'}: {reason}")


def _lines(text: str) -> list[str]:
    lines = re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))
    while lines and not lines[-1].strip():
        del lines[-1]
    if not lines:
        raise ScheduleError("an empty text is no schedule; it has a line for each rank, as in 0F0,0F1,0B0,0B1")
    return lines


def _split(line: str) -> Iterator[tuple[int, str]]:
    """Yield the cells of a line, without quotes and surrounding blanks, each with the column in which it begins."""
    at = 0
    while (match := _CELL.match(line, at)) is not None:
        text, begin = (match[2], match.start(2)) if match[1] is None else (match[1], match.start(1))
        yield begin + len(text) - len(text.lstrip()) + 1, text.strip()
        at = match.end() + 1
        if at > len(line):
            return


def _read(cell: str, line: int, column: int) -> Cell:
    if not cell:
        return ()
    if (overlapped := _OVERLAPPED.fullmatch(cell)) is None:
        return (_read_action(cell, line, column),)
    actions, at = [], column + 1
    for part in overlapped[1].split(";"):
        actions.append(_read_action(part.strip(), line, at + len(part) - len(part.lstrip())))
        at += len(part) + 1
    if sorted(action.name for action in actions) != ["B", "F"]:
        _refuse(
            line, column, cell, "what overlaps is a forward F and a full backward B; write others one after the other"
        )
    return tuple(actions)


def _read_action(text: str, line: int, column: int) -> Action:
    if (match := _ACTION.fullmatch(text)) is None:
        _refuse(line, column, text, NO_ACTION)
    stage, name, batch, on_parameters = match.groups()
    return Action(text, name or on_parameters, int(stage), -1 if batch is None else int(batch), line, column)


def _placement(lines: Sequence[Sequence[Cell]]) -> tuple[int, ...]:
    """Return the rank of each stage."""
    first: dict[int, Action] = {}
    for rank, line in enumerate(lines):
        if not any(line):
            raise ScheduleError(f"line {rank + 1}: rank {rank} does nothing, so it has no stage; leave the line out")
        for action in (action for cell in line for action in cell):
            first_action = first.setdefault(action.stage, action)
            if first_action.line != action.line:
                action.refuse(
                    f"stage {action.stage} is on line {first_action.line} already, with {first_action.text}; a stage "
                    f"is on one rank"
                )
    for number, stage in enumerate(sorted(first)):
        if number != stage:
            first[stage].refuse(f"there is a stage {stage} and no stage {number}; number stages from 0 without gaps")
    return tuple(first[stage].line - 1 for stage in range(len(first)))


def _batches(actions: Sequence[Action]) -> int:
    if (largest := max(action.batch for action in actions)) < 0:
        raise ScheduleError("no action has a micro-batch; give batches=")
    return largest + 1


def _check(actions: Sequence[Action], batches: int, stages: int) -> None:
    """Check that micro-batches and neighbours exist, and that backwards agree with the weight gradients."""
    weights = {(action.stage, action.batch): action for action in actions if action.name == "W"}
    for action in actions:
        weight_action = weights.get((action.stage, action.batch))
        if action.batch >= batches:
            action.refuse(f"there is no micro-batch {action.batch}, only 0 to {batches - 1}")
        if action.name == "I" and weight_action is None:
            action.refuse(
                f"this is the gradient of the input alone, but no {action.stage}W{action.batch} follows; add it, or "
                f"write B"
            )
        if action.name == "B" and weight_action is not None:
            beside = f"on line {weight_action.line}, column {weight_action.column} there is {weight_action.text}"
            action.refuse(f"this is a full backward, but {beside}, which is part of it; write I, or leave that out")
        if action.name in KIND_OF and action.task.kind in PEER and not 0 <= action.task.peer < stages:
            action.refuse(
                f"there is no stage {action.task.peer} at the other end, only 0 to {stages - 1}; leave it out"
            )


def _slot(cell: Cell, split: bool) -> Slot:
    """Return the slot of a cell; a full backward becomes both halves if the schedule has halves."""
    tasks: list[Task] = []
    for action in cell:
        tasks.append(action.task)
        if action.name == "B" and split:
            tasks.append(Task("WW", action.stage, action.batch))
    return Slot(tuple(tasks)) if tasks else EMPTY


def _order(line: Sequence[Cell], split: bool) -> list[Slot]:
    """Return the slots of a rank. Actions on parameters belong to the slot before them.

    At the very first they belong to a slot of their own.
    """
    slots: list[Slot] = []
    for cell in filter(None, line):
        if cell[0].name not in ON_PARAMETERS:
            slots.append(_slot(cell, split))
            continue
        slots = slots or [EMPTY]
        slots[-1] = replace(slots[-1], parameters=(*slots[-1].parameters, (cell[0].name, cell[0].stage)))
    return slots


def _in_time(table: Table, rank_of: Sequence[int]) -> bool:
    """Return whether every computation comes after those that it reads."""
    done: dict[Task, int] = {}
    for time, _, slot in placed(table):
        for task in slot.tasks:
            done.setdefault(task, time)
    return all(
        done[need] + later <= time
        for time, _, slot in placed(table)
        for need, later in needs(slot, rank_of, done.keys())
        if need not in slot.tasks
    )
