"""Inputs on which comparable systems were wrong, in settings in which they were not tried: the result of each.

An input is a part of a small model (tests/support/reported_inputs.py), which trains for three steps in float64 on a
mesh of three axes, with ``across=True`` there, on stages, in micro-batches, compiled, on two stages that are processes,
and with a piece of the batch on each of two processes (``local``). "equal": losses and parameters are those of one
device; "warned": a warning says that micro-batches have a loss of their own: it is another number, and so are the
parameters. A kind is one way to fail; reports of kinds that need no model (gathers, messages) are tests of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from processes import ranks
from reported_inputs import INPUTS, REFUSED, RIGHT, SETTINGS, verdicts

HELD = """\
"held": these train together, or are refused, in tests/simulated/test_reported.py (three axes, stages, micro-batches),
test_compiled_steps.py (compile) and tests/processes/test_reported_on_ranks.py (on three processes).
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))


def run(options: argparse.Namespace) -> str:
    found: dict[str, dict[str, str]] = {}
    for setting in options.settings:
        count = SETTINGS[setting].ranks
        found[setting] = (
            ranks(count).run(verdicts, options.names, setting)[0] if count else verdicts(options.names, setting)
        )
    return table(options.names, found)


def table(names: list[str], found: Mapping[str, Mapping[str, str]]) -> str:
    """One line an input, one column a setting; below it the words of what is not equal, once for each result."""
    lines = [f"{'kind':>4}  {'input':50} " + " ".join(f"{setting:>13}" for setting in found)]
    words: list[str] = []
    for name in names:
        results = [each[name] for each in found.values()]
        cells = [result.partition(":")[0] for result in results]
        one = INPUTS[name]
        held = "  held" if name in (*RIGHT, *REFUSED) else ""
        lines.append(f"{one.kind:4}  {one.what:50} " + " ".join(f"{cell:>13}" for cell in cells) + held)
        first = dict(zip(reversed(cells), reversed(results), strict=True))
        words += [f"{one.what}: {result}" for cell, result in first.items() if cell != "equal"]
    return "\n".join([*lines, "", HELD, *(["", *words] if words else [])]) + "\n"
