"""Choose where the forward is cut into stages: by cost, or by globs over its modules.

By cost, consecutive units (``units``) go to one stage. The longest stage is as short as possible; of the cuts within
5 % of that, those that need the least memory on a stage; of these, the one that sends the fewest bytes. Each is one
dynamic program over the units.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

from torch import fx

from autopar.capture.blocks import ancestors, module_paths
from autopar.errors import PlanError, at_line, shown
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.step.pipelined.cutting.units import Unit

NEAR = 1.05  # stages and memories that differ by less count as equal

Place = Callable[[fx.Node], int | None]  # op of the forward → its stage; ``None``: that of its last operand
Globs = Sequence[str | Sequence[str]]  # for each stage, one or several globs over module paths


def cut_by_cost(units: Sequence[Unit], stages: int, live: Sequence[float]) -> Place:
    """Cut the units into consecutive stages of balanced time and memory.

    Args:
        live: stage → how many micro-batches its activations are kept of at once.

    Raises:
        PlanError: there are fewer units than stages.
    """
    if len(units) < stages:
        names = ", ".join(dict.fromkeys(unit.name or "the root" for unit in units))
        raise PlanError(
            f"the schedule has {stages} stages, and the forward has {len(units)} parts between which it can be cut: "
            f"{names}; use fewer stages (a smaller pp, or fewer chunks), or a model with more layers"
        )
    first = best_cut(units, stages, live)
    numbers = itertools.accumulate(int(k in first) for k in range(len(units)))
    stage = {node: number - 1 for unit, number in zip(units, numbers, strict=True) for node in unit.nodes}
    return stage.__getitem__


def cut_by_blocks(units: Sequence[Unit], cut: Sequence[int], count: int) -> Place:
    """Cut as a pipeline was chosen on paper: between the blocks of the model, or between its units.

    What stands before a block goes to its stage, and what stands behind the last block to the last stage.

    Args:
        cut: the first block of each stage.
        count: the number of blocks that the pipeline was chosen for.

    Raises:
        PlanError: the model has other numbers of blocks and units.
    """
    starts = list({unit.name: k for k, unit in reversed(list(enumerate(units))) if unit.is_block}.values())[::-1]
    if count == len(units):
        starts = list(range(len(units)))
    elif count != len(starts):
        raise PlanError(
            f"the pipeline is of {count} blocks, and the model has {len(starts)} "
            f"({', '.join(units[k].name for k in starts)}) and {len(units)} parts in all: choose a pipeline of as "
            f"many, or give stages="
        )
    first = [0, *(starts[block] for block in cut[1:])]
    numbers = itertools.accumulate(int(k in first) for k in range(len(units)))
    stage = {node: number - 1 for unit, number in zip(units, numbers, strict=True) for node in unit.nodes}
    return stage.__getitem__


def best_cut(units: Sequence[Unit], stages: int, live: Sequence[float]) -> list[int]:
    """Return the first unit of each stage."""
    facts = zip(*((unit.seconds, unit.held, unit.activations) for unit in units), strict=True)
    seconds, held, kept = ([0.0, *itertools.accumulate(column)] for column in facts)

    def time(begin: int, end: int, stage: int) -> float:
        return seconds[end] - seconds[begin]

    def memory(begin: int, end: int, stage: int) -> float:
        return held[end] - held[begin] + live[stage] * (kept[end] - kept[begin])

    longest, _ = _least(len(units), stages, lambda *at: time(*at), max)

    def memory_in_time(*at: int) -> float:
        return memory(*at) if time(*at) <= longest * NEAR else math.inf

    largest, _ = _least(len(units), stages, memory_in_time, max)

    def sent(begin: int, end: int, stage: int) -> float:
        fits = time(begin, end, stage) <= longest * NEAR and memory(begin, end, stage) <= largest * NEAR
        return units[begin].crossing if fits else math.inf

    return _least(len(units), stages, sent, lambda a, b: a + b)[1]


def _least(
    count: int, stages: int, cost: Callable[[int, int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least joined cost of all cuts, and the first unit of each stage of such a cut.

    Args:
        cost: of the units ``begin … end - 1`` on a stage.
        joined: of the costs of several stages.
    """
    best = {0: (0.0, [0])}  # number of units → the least cost of the stages so far, and their first units
    for stage in range(stages):
        left = stages - stage - 1  # stages that come later, with one unit each at least
        ends = range(stage + 1, count - left + 1) if left else (count,)
        best = {
            end: min(
                (joined(least, cost(begin, end, stage)), [*first, begin] if stage else first)
                for begin, (least, first) in best.items()
                if begin < end
            )
            for end in ends
        }
    return best[count]


def cut_by_globs(program: Program, ops: Sequence[fx.Node], globs: Globs, stages: int) -> Place:
    """Cut by globs over module paths: an op is on the stage whose glob matches its module, or one around it.

    Ops of modules that no glob matches, and that contain matched ones, follow their operands.

    Raises:
        PlanError: there are other numbers of globs than stages; a glob matches nothing; a module is on two stages, or
            on none.
    """
    chosen = _chosen(module_paths(program), globs, stages)
    around = {outer for path in chosen for outer in ancestors(path)}

    @cache
    def stage_of(path: str) -> int | None:
        return next((chosen[outer] for outer in reversed(ancestors(path)) if outer in chosen), None)

    for node in ops:
        record = record_of(node)
        if stage_of(record.module) is None and record.module not in around:
            raise PlanError(
                f"no stage has the module {record.module}\n{at_line(record.source, record.module)}\n  add a glob that "
                f"matches it to one of stages="
            )
    return lambda node: stage_of(record_of(node).module)


def _chosen(paths: Sequence[str], globs: Globs, stages: int) -> dict[str, int]:
    """Return the stage of each module that a glob matches."""
    if not isinstance(globs, (str, Sequence)):
        raise PlanError(f"stages={shown(globs)}: give one glob over module paths, or a list of them, for each stage")
    if isinstance(globs, str) or len(globs) != stages:
        raise PlanError(
            f"stages={shown(globs)} gives globs for {1 if isinstance(globs, str) else len(globs)} stages, and the "
            f"schedule has {stages}: give one glob, or a list of them, for each"
        )
    chosen: dict[str, int] = {}
    for stage, of_stage in enumerate(globs):
        if not isinstance(of_stage, (str, Sequence)):
            raise PlanError(f"stages= has {shown(of_stage)} for stage {stage}: give globs over module paths")
        for glob in [of_stage] if isinstance(of_stage, str) else of_stage:
            if not isinstance(glob, str):
                raise PlanError(f"stages= has {shown(glob)} for stage {stage}: give globs over module paths")
            matched = [path for path in paths if path and _matches(path, glob)]
            if not matched:
                named = [path for path in paths if path]
                near = difflib.get_close_matches(glob.lstrip("*."), named, n=3, cutoff=0.3) or named[:3]
                raise PlanError(
                    f"the glob {glob!r} of stage {stage} matches no module that runs an op; near it: {', '.join(near)}"
                )
            for path in matched:
                if chosen.setdefault(path, stage) != stage:
                    raise PlanError(
                        f"the module {path} is on stage {chosen[path]}, and {glob!r} puts it on stage {stage}, too: "
                        f"change one of the globs"
                    )
    return chosen


def _matches(path: str, glob: str) -> bool:
    return fnmatch.fnmatchcase("." + path, glob) or fnmatch.fnmatchcase(path, glob)
