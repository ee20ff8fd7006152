"""Define the lines of a timetable: a run of a program, or a slot of a pipeline's schedule; with their text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from autopar.errors import TextError
from autopar.pipeline.task import ON_PARAMETERS, Slot, Task

WHOLE = "whole"  # all of a program

# what runs hand on, by the words of a timetable
GROUPS = {
    "batches": "the inputs of all micro-batches",
    "inputs": "the inputs of the micro-batch",
    "copies": "copies of parameters: in low precision, gathered, or of another stage",
    "totals": "sums over micro-batches that counts are made of",
    "counts": "the mean counts that the losses are divided by",
    "sums": "the sums of gradients and of losses",
    "kept": "what later phases of the micro-batch read of earlier ones",
    "outputs": "the outputs of micro-batches that one stage has made",
    "started": "collectives that the next step waits for",
}


class Entry(NamedTuple):
    """One run of a program.

    Attributes:
        program: its name, as in ``step.local(rank)``.
        part: a phase of it, or a part of a rotated program; ``whole`` for all of it.
        stage: the stage of a pipeline; ``None`` where there are none.
        batch: the micro-batch; ``None`` for the step as a whole.
        takes, hands: what it takes of earlier runs, and what it hands on to later ones: words of ``GROUPS``.
        empties: of what it takes, what nothing takes later: its memory is freed while the run goes on.
    """

    program: str
    part: str = WHOLE
    stage: int | None = None
    batch: int | None = None
    takes: tuple[str, ...] = ()
    hands: tuple[str, ...] = ()
    empties: tuple[str, ...] = ()

    def __str__(self) -> str:
        part = "" if self.part == WHOLE else f".{self.part.replace(' ', '_')}"
        stage = "" if self.stage is None else f"@{self.stage}"
        batch = "" if self.batch is None else f" {self.batch}"
        given = zip(VERBS, self[4:], strict=True)
        words = "".join(f" {verb} {' '.join(groups)}" for verb, groups in given if groups)
        return f"{self.program}{part}{stage}{batch}{words}"

    def with_groups(self, **groups: Iterable[str]) -> Entry:
        """Return the entry with others of ``takes``, ``hands`` and ``empties``, in the order of ``GROUPS``."""
        ordered: dict[str, Any] = {verb: tuple(sorted({*words}, key=ORDER.index)) for verb, words in groups.items()}
        return self._replace(**ordered)

    @property
    def what(self) -> tuple[str, str]:
        """The program and the part of it."""
        return self.program, self.part


VERBS, ORDER = ("takes", "hands", "empties"), list(GROUPS)
Line = Entry | Slot
_ENTRY = re.compile(r"([a-z]+)(?:\.([a-z_]+))?(?:@(\d+))?(?: (\d+))?((?: [a-z ]+)?)")
_TASK = re.compile(r"([FBW][WSR])(\d+)@(\d+)(?:[<>](\d+))?")


def text_of(line: Line) -> str:
    """Return the text of a line: ``last 3 takes sums``, or ``FR00@1<0 FW00@1 free FS00@1>2``."""
    if isinstance(line, Entry):
        return str(line)
    words = list(map(_task_text, line.tasks))
    words += ["free", *map(_task_text, line.free)] if line.free else []
    words += [f"{name}@{stage}" for name, stage in line.parameters]
    return " ".join(words)


def line_of(text: str) -> Line:
    """Return the line that prints as ``text``; ``TextError`` otherwise."""
    return _slot_of(text) if re.match(r"[A-Z]|free ", text) else _entry_of(text)


def _task_text(task: Task) -> str:
    peer = "" if task.peer < 0 else f"{'>' if task.action == 'S' else '<'}{task.peer}"
    return f"{task}@{task.stage}{peer}"


def _entry_of(text: str) -> Entry:
    found = _ENTRY.fullmatch(text)
    if found is None:
        raise TextError(f"a run is written as 'inner 1 takes counts sums hands sums', and not {text!r}")
    program, part, stage, batch, words = found.groups()
    groups: dict[str, list[str]] = {verb: [] for verb in VERBS}
    at = None
    for word in words.split():
        if word in groups:
            at = groups[word]
        elif at is None or word not in GROUPS:
            raise TextError(f"{word!r} in {text!r} is none of {', '.join(GROUPS)}, behind {', '.join(VERBS)}")
        else:
            at.append(word)
    at_stage, of_batch = (None if number is None else int(number) for number in (stage, batch))
    takes, hands, empties = map(tuple, groups.values())
    return Entry(program, (part or WHOLE).replace("_", " "), at_stage, of_batch, takes, hands, empties)


def _slot_of(text: str) -> Slot:
    tasks, free, parameters = list[Task](), list[Task](), list[tuple[str, int]]()
    into = tasks
    for word in text.split():
        name, _, stage = word.partition("@")
        if word == "free":
            into = free
        elif (found := _TASK.fullmatch(word)) is not None:
            kind, batch, at, peer = found.groups()
            into.append(Task(kind, int(at), int(batch), -1 if peer is None else int(peer)))
        elif name in ON_PARAMETERS and stage.isdecimal():
            parameters.append((name, int(stage)))
        else:
            raise TextError(f"{word!r} in {text!r} is no task: a task is written as FW00@1, FS00@1>2 or FR00@1<0")
    return Slot(tuple(tasks), tuple(free), tuple(parameters))
