"""Read golden files: an input program, ``---``, and what the pass named by the folder makes of it.

Comments on top of the input hold the options: ``# bf16-O1: …`` is the policy of ``amp``, ``# what min-cut`` the regions
of ``recompute``, ``# at dp=1 tp=0`` the rank of ``localize``, ``# overlap today at dp=1`` the policy of ``schedule``
and the rank, ``# hosts of 4`` the hosts of ``levels``. A comment behind a value, ``# layers.0``, is its module.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autopar.costs.durations import durations
from autopar.costs.machine import Level, Link, Machine, machine_of
from autopar.ir.nodes import record_of, set_record
from autopar.ir.program import Program
from autopar.passes import (
    Amp,
    Defer,
    Expand,
    Fold,
    Follow,
    Levels,
    Lift,
    Narrow,
    Pass,
    Place,
    Reassociate,
    Recompute,
    Reshard,
    Share,
    Widen,
    pipeline,
    run_passes,
)
from autopar.report.passes import PassReport
from autopar.runtime.localize import LocalPrograms, localize
from autopar.scheduling.programs.order import OF_CALLS, Order, decide
from autopar.scheduling.programs.overlap import overlap_of
from autopar.verify.levels import verify

GOLDEN = Path(__file__).parents[1] / "golden"
SEPARATOR = "---\n"
PASSES: dict[str, Callable[[str], Pass]] = {
    "amp": lambda text: Amp(_option(r"# (\S+): ", text)),
    "recompute": lambda text: Recompute(_option(r"# what (\S+)", text)),
    "reassociate": lambda text: Reassociate(),
    "expand": lambda text: Expand(),
    "place": lambda text: Place(),
    "follow": lambda text: Follow(),
    "narrow": lambda text: Narrow(),
    "lift": lambda text: Lift(),
    "defer": lambda text: Defer(),
    "widen": lambda text: Widen(),
    "reshard": lambda text: Reshard(),
    "fold": lambda text: Fold(),
    "share": lambda text: Share(),
    "levels": lambda text: Levels(machine_with(text)),
}
FOLDERS = (*PASSES, "localize", "schedule", "whole", "cuda")
CASES = sorted(path for folder in FOLDERS for path in (GOLDEN / folder).glob("*.txt"))


def case_name(path: Path) -> str:
    """``fold/there_and_back``."""
    return f"{path.parent.name}/{path.stem}"


def read(text: str) -> Program:
    """The program of one part of a golden file, with the modules that comments name."""
    program = Program.parse(text)
    modules = dict(re.findall(r"^  (\w+) : [^#\n]*  # (\S+)$", text, re.MULTILINE))
    for node in program.nodes:
        if node.name in modules:
            set_record(node, record_of(node)._replace(module=modules[node.name]))
    verify(program)
    return program


def run_pass(folder: str, text: str) -> tuple[Program, PassReport]:
    """What the pass of a folder makes of an input, and its report."""
    program = read(text)
    (report,) = run_passes(program, [PASSES[folder](text)])
    return program, report


def expected(folder: str, text: str) -> list[str]:
    """The parts behind the input, as the passes make them: one, but of ``amp`` two, for its transfers are worth
    seeing."""
    if folder == "localize":
        local = localize(read(text), coordinates(text))
        verify(local)
        return [str(local)]
    if folder == "schedule":
        return [str(LocalPrograms(read(text), verify, order_of(text))[rank_of(text)])]
    if folder in ("whole", "cuda"):
        program = read(text)
    else:
        program, _ = run_pass(folder, text)
    made = [] if folder in ("whole", "cuda") else [str(program)]
    if folder in ("whole", "amp", "cuda"):
        run_passes(program, pipeline())
        made.append(str(program))
    return [*made, *_of_ranks(program, text)] if folder == "cuda" else made


def _of_ranks(program: Program, text: str) -> list[str]:
    """The local program of the rank that a comment names, if one does; those of all ranks are verified."""
    programs = LocalPrograms(program, verify)
    assert programs.every_class
    return [str(programs[rank_of(text)])] if "# at " in text else []


def machine_with(text: str) -> Machine:
    """A machine with the hosts of a golden file, and its racks: ``# hosts of 2, racks of 4``."""
    sizes = {name: int(count) for name, count in re.findall(r"(hosts|racks) of (\d+)", text)}
    racks = (Level("rack", sizes["racks"], Link(5e-5, 2e9)),) if "racks" in sizes else ()
    return replace(machine_of("generic"), ranks_per_node=sizes["hosts"], levels=racks)


def order_of(text: str) -> Order:
    """The order of a golden file's explicit program on a CPU, by the figures of the default machine."""
    program, overlap = read(text), overlap_of(_option(r"# overlap (\S+)", text), "direct")
    return decide(program, OF_CALLS, durations(program, machine_of("cpu")), overlap)


def rank_of(text: str) -> int:
    mesh = read(text).mesh
    assert mesh is not None
    return mesh.rank(coordinates(text))


def coordinates(text: str) -> dict[str, int]:
    """The rank for which ``localize`` and ``schedule`` make the program."""
    return {axis: int(index) for axis, index in (pair.split("=") for pair in _option(r"# .*?at (.*)", text).split())}


def _option(pattern: str, text: str) -> str:
    option = re.search(pattern, text)
    assert option is not None, f"the input has no comment {pattern}"
    return option[1]
