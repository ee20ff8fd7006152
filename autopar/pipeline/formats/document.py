"""Write and read a schedule as JSON, without loss, with one line for each row.

A row is a list of slots, one for each rank; a slot is a list of words:

    "FW0@1"          a computation: its kind, the micro-batch, the stage
    "FS0@1>2"        a send, and the stage that it goes to
    "FR0@2<1"        a receive, and the stage that it comes from
    "free FS0@1>2"   the buffer of that send is released
    "REDUCE_GRAD@1"  what is done to the parameters of a stage

Events are not written, because they follow from the rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from autopar.errors import ScheduleError
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.task import KINDS, ON_PARAMETERS, Slot, Task

FORMAT, VERSION = "autopar pipeline schedule", 1


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _ranks(value: object) -> bool:
    return type(value) is list and bool(value) and all(map(_whole, value)) and max(value) + 1 == len(set(value))


# field → what it is, and whether a value is that
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "format": (f'"{FORMAT}"', lambda value: value == FORMAT),
    "version": (f"{VERSION}", lambda value: _whole(value) and value == VERSION),
    "name": ("a string that can be printed, the name of the policy",
             lambda value: isinstance(value, str) and value.isprintable()),
    "batches": ("a whole number from 1 to 999999999", lambda value: _whole(value) and value > 0),
    "rank_of": ("a list, the rank of each stage, with ranks from 0 without gaps", _ranks),
    "recompute": ("true or false", lambda value: isinstance(value, bool)),
    "rows": ("a list of rows", lambda value: type(value) is list),
}  # fmt: skip
WORDS = (
    "FW0@1, BW0@1 or WW0@1, FS0@1>2 or BS0@1>0, FR0@1<0 or BR0@1<2, free FS0@1>2, REDUCE_GRAD@1, UNSHARD@1 or RESHARD@1"
)

_NUMBER = "(0|[1-9][0-9]{0,8})"
_TASK = re.compile(f"(free )?({'|'.join(KINDS)}){_NUMBER}@{_NUMBER}(?:([<>]){_NUMBER})?")
_PARAMETERS = re.compile(f"({'|'.join(ON_PARAMETERS)})@{_NUMBER}")
_DIRECTION = {"W": None, "S": ">", "R": "<"}


def to_json(schedule: ScheduleTable) -> str:
    """Return the document, from which ``from_json`` makes an equal schedule."""
    values = [FORMAT, VERSION, schedule.name, schedule.batches, schedule.rank_of, schedule.recompute]
    lines = [f"  {json.dumps(field)}: {json.dumps(value)},\n" for field, value in zip(FIELDS, values, strict=False)]
    rows = ",\n".join("    " + json.dumps([_words(slot) for slot in row]) for row in schedule.slots)
    return "{\n" + "".join(lines) + '  "rows": [' + (f"\n{rows}\n  " if rows else "") + "]\n}\n"


def _words(slot: Slot) -> list[str]:
    return [
        *(f"free {_word(task)}" for task in slot.free),
        *map(_word, slot.tasks),
        *(f"{name}@{stage}" for name, stage in slot.parameters),
    ]


def _word(task: Task) -> str:
    direction = _DIRECTION[task.kind[1]]
    return f"{task.kind}{task.batch}@{task.stage}" + (f"{direction}{task.peer}" if direction else "")


def from_json(text: str, make: Callable[..., Schedule]) -> Schedule:
    """Return the schedule of a document.

    Args:
        make: the class of the schedule.

    Raises:
        ScheduleError: the text is not JSON, or not such a document; the error gives line and column.
    """
    if not isinstance(text, str):
        raise TypeError(f"a document is a text, not {text!r:.80}; read a file with PipelineSchedule.load(path)")
    document = _Document(text.removeprefix("\ufeff"))
    members = document.fields()
    for field, (meaning, is_right) in FIELDS.items():
        if not is_right(members[field]):
            document.refuse((document.number[field],), f"{field} is {meaning}")
    rank_of = tuple(members["rank_of"])
    rows = tuple(document.row(time, row, members["batches"], rank_of) for time, row in enumerate(members["rows"]))
    return make(rows, members["batches"], rank_of, members["name"], members["recompute"])


class _Object(list):
    """The members of an object, in order, with those that are given twice."""


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 10 else float(digits)  # which no field takes


_DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_int=_integer)
_BLANK = re.compile(r"[ \t\n\r]*")
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class _Document:
    """A text and its parsed value. A path leads to a value inside it.

    The path is the number of a member or an element, then the number within that.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.number: dict[str, int] = {}
        try:
            self.value = _DECODER.decode(text)
        except json.JSONDecodeError as error:
            raise ScheduleError(f"line {error.lineno}, column {error.colno}: this is not JSON: {error.msg}") from None
        except RecursionError:
            self._refuse_at(self._deep(), "lists nest deeper than rows, row, slot")

    def fields(self) -> dict[str, Any]:
        """Return the members by name: all of ``FIELDS``, and no other."""
        if not isinstance(self.value, _Object):
            self.refuse((), f"a schedule is an object with the fields {', '.join(FIELDS)}")
        members: dict[str, Any] = {}
        for number, (field, value) in enumerate(self.value):
            if field in members:
                self.refuse((number,), "the field is given twice; leave one out", key=True)
            members[field], self.number[field] = value, number
        if _whole(version := members.get("version")) and version != VERSION:
            self.refuse(
                (self.number["version"],), f"a document of version {version}; this autopar reads version {VERSION}"
            )
        for field, number in self.number.items():
            if field not in FIELDS:
                self.refuse((number,), f"there is no such field; the fields are {', '.join(FIELDS)}", key=True)
        for field, (meaning, _) in FIELDS.items():
            if field not in members:
                self.refuse((), f"the field {field} is missing; it is {meaning}")
        return members

    def row(self, time: int, row: Any, batches: int, rank_of: tuple[int, ...]) -> tuple[Slot, ...]:
        ranks, path = max(rank_of) + 1, (self.number["rows"], time)
        if type(row) is not list or len(row) != ranks:
            self.refuse(path, f"row {time} is a list of {ranks} slots, one for each rank")
        return tuple(self._slot((*path, rank), slot, batches, rank_of) for rank, slot in enumerate(row))

    def _slot(self, path: tuple[int, ...], words: Any, batches: int, rank_of: tuple[int, ...]) -> Slot:
        if type(words) is not list:
            self.refuse(path, f"a slot is a list of words: {WORDS}")
        free, tasks, parameters = list[Task](), list[Task](), list[tuple[str, int]]()
        for number, word in enumerate(words):
            word_path = (*path, number)
            if isinstance(word, str) and (match := _TASK.fullmatch(word)):
                freed, kind, batch, stage, direction, peer = match.groups()
                if direction != _DIRECTION[kind[1]] or (freed and kind[1] != "S"):
                    self.refuse(word_path, f"there is no such word; there are {WORDS}")
                task = Task(kind, int(stage), int(batch), int(peer) if peer else -1)
                self._check_stage(word_path, task.stage, path[-1], rank_of)
                if task.batch >= batches:
                    self.refuse(word_path, f"there is no micro-batch {task.batch}, only 0 to {batches - 1}")
                if peer and (task.peer >= len(rank_of) or task.peer == task.stage):
                    self.refuse(word_path, f"there is no other stage {task.peer}; stages are 0 to {len(rank_of) - 1}")
                (free if freed else tasks).append(task)
            elif isinstance(word, str) and (match := _PARAMETERS.fullmatch(word)):
                self._check_stage(word_path, int(match[2]), path[-1], rank_of)
                parameters.append((match[1], int(match[2])))
            else:
                self.refuse(word_path, f"there is no such word; there are {WORDS}")
        return Slot(tuple(tasks), tuple(free), tuple(parameters))

    def _check_stage(self, path: tuple[int, ...], stage: int, rank: int, rank_of: tuple[int, ...]) -> None:
        if stage >= len(rank_of):
            self.refuse(path, f"there is no stage {stage}, only 0 to {len(rank_of) - 1}")
        if rank_of[stage] != rank:
            self.refuse(path, f"stage {stage} is on rank {rank_of[stage]}, but this is slot {rank} of the row")

    # -- places ------------------------------------------------------------------------------------------------------

    def refuse(self, path: tuple[int, ...], reason: str, *, key: bool = False) -> NoReturn:
        """Raise for the value at a path, or for its key."""
        at = self._find(path, key)
        quoted = self.text[at : self._end(at)]
        self._refuse_at(at, f"{quoted if len(quoted) <= 40 else quoted[:37] + '...'}: {reason}".replace("\n", " "))

    def _refuse_at(self, at: int, reason: str) -> NoReturn:
        line, column = self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
        raise ScheduleError(f"line {line}, column {column}: {reason}")

    def _find(self, path: tuple[int, ...], key: bool) -> int:
        """Return where a value begins. The text is valid, so that everything before it is skipped without checks."""
        at = member = self._skip(0)
        for number in path:
            in_object = self.text[at] == "{"
            at = self._skip(at + 1)
            for left in range(number, -1, -1):
                member = at
                if in_object:
                    at = self._skip(self._skip(self._end(at)) + 1)  # over the key and its colon
                if left:
                    at = self._skip(self._skip(self._end(at)) + 1)  # over the value and its comma
        return member if key else at

    def _skip(self, at: int) -> int:
        match = _BLANK.match(self.text, at)
        return match.end() if match else at

    def _end(self, at: int) -> int:
        return _DECODER.raw_decode(self.text, at)[1]

    def _deep(self) -> int:
        """Return the position of the first bracket that is too deep for a schedule."""
        depth = 0
        for match in _NESTING.finditer(self.text):
            depth += (match[0] in "[{") - (match[0] in "]}")
            if depth > 4:
                return match.start()
        return 0
