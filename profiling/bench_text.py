"""Measure how long a program takes to print, to parse, to compare and to verify, in CPU milliseconds.

The program is that of a Llama under ``LLAMA_PLAN`` on a mesh of four: as reshard is given it, as reshard leaves it, and
the local program of one rank. *new* is the parsing of a text of which no line was read before in the process, *known*
of one that was read. *copy* makes the same nodes without a text: what FX alone needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from profilers import positive

from autopar.examples.workloads import MESH, placed_llama
from autopar.ir.program import Program
from autopar.ir.text.parser import forget, parse_program
from autopar.ir.text.printer import print_program
from autopar.passes import Fold, Reshard, Share, run_passes
from autopar.runtime.localize import localize
from autopar.verify.levels import verify

LINES = [parse_program, print_program]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--runs", type=positive, default=7, help="the fastest one counts")


def fastest(runs: int, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The CPU milliseconds of the fastest run; ``before`` is not counted."""
    found = []
    for _ in range(runs):
        before()
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found) * 1e3


def run(options: argparse.Namespace) -> str:
    programs = {"placed": placed_llama(options.layers)}
    programs["explicit"] = programs["placed"].copy()
    run_passes(programs["explicit"], [Reshard(), Fold(), Share()])
    programs["local"] = localize(programs["explicit"], dict.fromkeys(MESH.names, 0))
    columns = ("lines", "parse new", "known", "print", "equal", "verify", "copy")
    lines = [f"{'program':10}" + "".join(f"{column:>11}" for column in columns)]
    for name, program in programs.items():
        text = str(program)
        again = Program.parse(text)
        row = [
            fastest(options.runs, lambda text=text: Program.parse(text), forget),
            fastest(options.runs, lambda text=text: Program.parse(text)),
            fastest(options.runs, again.text),
            fastest(options.runs, lambda again=again, program=program: again == program),
            fastest(options.runs, lambda again=again: verify(again)),
            fastest(options.runs, again.copy),
        ]
        lines.append(f"{name:10}{text.count(chr(10)):11}" + "".join(f"{ms:11.1f}" for ms in row))
    return "\n".join(lines) + "\n"
