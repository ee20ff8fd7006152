"""Make the order of a rank from phases, which say how often to repeat which passes.

``(3, "F0 F1")`` is three times a forward of chunk 0 and a forward of chunk 1, each of the next micro-batch of its
chunk. F is a forward, B a backward, I a backward that leaves its weight gradient to a later W. W takes the oldest one
left, W1 the oldest of chunk 1. Passes in parentheses share a slot. A phase may be longer than there are micro-batches:
passes of missing ones are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.pipeline.task import Slot, Task

Phases = Iterable[tuple[int, str]]


def order(phases: Phases, stages: Sequence[int], batches: int, split: bool) -> list[Slot]:
    """Return the slots of one rank, in order, followed by the weight gradients that are left.

    Args:
        stages: the stages of the rank, one for each chunk.
        batches: the micro-batches of the step; the phases may have been made for more.
        split: whether the policy has an I anywhere; then a B has its W in the same slot.
    """
    following: dict[tuple[str, int], int] = {}
    left: list[tuple[int, int]] = []
    done: list[Slot] = []
    for count, pattern in phases:
        slots = list(_slots(pattern))
        for _ in range(count):
            for letters in slots:
                tasks = [
                    task
                    for letter in letters
                    for task in _tasks(letter, stages, following, left, split)
                    if task.batch < batches
                ]
                if tasks:
                    done.append(Slot(tuple(tasks)))
    return done + [Slot((Task("WW", stage, batch),)) for stage, batch in left if batch < batches]


def _slots(pattern: str) -> Iterator[list[str]]:
    together: list[str] | None = None
    for word in pattern.split():
        letters = [] if together is None else together
        letters.append(word.strip("()"))
        together = letters if (word.startswith("(") or together is not None) and not word.endswith(")") else None
        if together is None:
            yield letters


def _tasks(word: str, stages: Sequence[int], following: dict[tuple[str, int], int], left: list[tuple[int, int]],
           split: bool) -> Iterator[Task]:  # fmt: skip
    letter, stage = word[0], stages[int(word[1:] or 0)]
    if letter == "W":
        if (oldest := next((passed for passed in left if word == "W" or passed[0] == stage), None)) is not None:
            left.remove(oldest)
            yield Task("WW", *oldest)
        return
    kind = "FW" if letter == "F" else "BW"
    batch = following[kind, stage] = following.get((kind, stage), -1) + 1
    if letter == "I":
        left.append((stage, batch))
    yield Task(kind, stage, batch)
    if letter == "B" and split:
        yield Task("WW", stage, batch)
