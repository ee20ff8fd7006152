"""Say how much more than eager a captured step computes, where it computes experts for all tokens."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence


def about_rows(rows: Sequence[tuple[str, int, int, int]]) -> Iterator[str]:
    """Yield a sentence for each line of the model that adds up rows of experts.

    Args:
        rows: for each time: the line, the number of experts, the rows that all of them compute, and the choices.
    """
    times = collections.Counter(rows)
    for (line, experts, computed, choices), count in times.items():
        if computed > choices:
            often = f", {count} times" if count > 1 else ""
            yield (
                f"{experts} experts are computed for all tokens{often}: {computed} rows, which is "
                f"{computed / choices:.1f}× the FLOPs of eager's, where each of the {choices} choices computes one "
                f"row\n    {line}"
            )


def about_assumptions(assumed: Sequence[tuple[object, str]]) -> Iterator[str]:
    """Yield a sentence for each line that reads a value of the inputs, which the captured step is for."""
    for line in dict.fromkeys(line for _, line in assumed):
        yield (
            f"this line asks for a value of the inputs or buffers; the captured step is for the answer in this call, "
            f"and raises an error where it is another\n    {line}"
        )


def other_answer(line: str) -> str:
    """Return the error of a call in which a line reads another value than in the captured one."""
    return (
        f"the step was captured for another answer to this line\n    {line}\n"
        f"  make a parallelize(..., example=...) of its own for batches that have this answer"
    )
