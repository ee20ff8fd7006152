"""Run ``autopar verify``: check the programs of a model on a mesh, the communication of all ranks, and its numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from autopar.cli.output import Output, output_of
from autopar.cli.plan.compared import compared, in_float64
from autopar.cli.plan.options import VerifyOptions
from autopar.cli.plan.planning import Planned, planning_of
from autopar.cli.plan.rank import NEAR, check_memory, is_near, of_rank, with_step
from autopar.cli.plan.show import show_notes, show_request
from autopar.cli.status import DONE, FAILED, status_of
from autopar.errors import ChannelError, VerifyError
from autopar.ir import transfers
from autopar.ir.program import Program
from autopar.parallel import Parallel
from autopar.report.progress import doing
from autopar.search.solutions.solution import Solution
from autopar.step.train_step import TrainStep
from autopar.verify.channels.classes import RankClass, check_classes


def verify(options: VerifyOptions) -> int:
    """Run with the options and return the exit status: 0 if all is right, 1 if something is wrong."""
    return status_of(partial(_follow, options), options.model)


def _follow(options: VerifyOptions) -> int:
    output = output_of(options)
    planning, plan = planning_of(options, "autopar verify", values=options.run, stages=True)
    planning = with_step(planning, options)
    if options.run:
        planning = in_float64(planning)
    show_request(output, options, planning)
    found: dict[str, Any] = {"verified": True}
    say = partial(output.text.print, soft_wrap=True)
    try:
        planned = planning.placed(plan)
        show_notes(output.notes, planned.reports)
        say()
        for name, said, figures in _checks(planned):
            found[name] = figures
            say(f"{name}: {said}")
    except (VerifyError, ChannelError) as error:
        return _wrong(output, found, str(error))
    if options.rank is not None:
        assert isinstance(planned, TrainStep)
        say(f"rank {options.rank}: {check_memory(planned, options.rank)}")
        # the plans of stages are searched again: those of several stages are no plan of one model
        given = planned.solution if isinstance(planned.solution, Solution) else plan
        with doing(f"run rank {options.rank}"):
            report = of_rank(planning, given, options.rank)
        found["rank"] = report.figures()
        output.text.print(f"\n{report}", end="", soft_wrap=True)
        if not is_near(report):
            return _wrong(output, found, f"{report.memory}, more than {NEAR:.0%}")
    if not options.run:
        output.give(found)
        return DONE
    with doing("run all ranks"):
        numbers = compared(planned, planning)
    found["numbers"] = asdict(numbers)
    said = f"{numbers.count} values, {numbers.what}: the largest difference is {numbers.largest:.1e}, of {numbers.of}"
    if not numbers.equal:
        return _wrong(output, found, f"{said}, more than {numbers.tolerance:g}; {numbers.first}")
    say(f"numbers: {said}, within {numbers.tolerance:g}: those of a single device, in float64 and without dropout")
    output.give(found)
    return DONE


def _wrong(output: Output, found: Mapping[str, Any], said: str) -> int:
    print(f"autopar: {said}", file=sys.stderr)
    output.give({**found, "verified": False, "why": said})
    return FAILED


def _checks(planned: Planned) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Check all programs; yields the name of what was checked, the result in words, and figures."""
    names = [row.name for row in planned.reports if row.name not in ("plan", "price")]
    yield "passes", f"{', '.join(names)}; each was verified after it ran", {"names": names}
    for name, program in _explicit(planned).items():
        with doing(f"verify {name}"):
            program.verify()
        count = len(list(program.nodes))
        yield f"explicit {name}", f"{count:,} lines; each use has the layout and dtype it requires", {"lines": count}
    for name, classes in _of_ranks(planned).items():
        for one in classes:
            with doing(f"verify {name} of a rank"):
                one.program.verify()
        with doing(f"channels of {name}"):
            check_classes(classes)
        ranks, counts = sum(len(one.ranks) for one in classes), [_collectives(one.program) for one in classes]
        lines = sum(len(list(one.program.nodes)) for one in classes)
        yield (
            f"scheduled {name}",
            f"{ranks:,} ranks in {len(classes)} class{'es' * (len(classes) > 1)}, {lines:,} lines; "
            f"{max(counts)} transfers of a rank meet in one order, and no rank waits forever",
            {"ranks": ranks, "classes": len(classes), "lines": lines, "transfers": max(counts)},
        )


def _explicit(planned: Planned) -> Mapping[str, Program]:
    """Return the explicit programs by name."""
    return {"call": planned.program} if isinstance(planned, Parallel) else planned.program.programs


def _of_ranks(planned: Planned) -> Mapping[str, Sequence[RankClass]]:
    """Return the scheduled programs by class of ranks, by the name of the part of a step."""
    return planned.rank_classes


def _collectives(program: Program) -> int:
    """Return how many transfers a rank takes part in."""
    rows = (transfers.BY_FUNCTION.get(node.target) for node in program.nodes)
    return sum(row is not None and row.collective for row in rows)
