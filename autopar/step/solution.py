"""Certify the plan of a whole step: its price, and a lower bound for the micro-batches and the update together."""

from __future__ import annotations

from dataclasses import replace

from autopar.costs.machine import Machine
from autopar.costs.program_price import Programs, node_prices, price
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import ValueType
from autopar.model.planner import repriced
from autopar.search.solutions.searched_update import searched_update
from autopar.search.solutions.solution import Solution, timed
from autopar.search.solutions.step_choice import StepChoice

OF_ANOTHER_STEP = "the plan was searched for a step with another update ({}), so nothing is proven"


def solution_of(found: Solution, step: Programs, words: str) -> Solution:
    """Return the plan of a step, or of one stage of it, priced as its explicit programs.

    The search has priced the micro-batches, the reductions of gradients and the ops of the update. Ops on single
    numbers, such as counts of steps, are the same in all plans, so the bound has them too. A plan that was searched for
    a step with another update has no bound here.

    Args:
        words: the optimizer and the options of the step, such as ``AdamW, clip_norm=1.0``.
    """
    machine = found.machine
    nanoseconds = price(step, machine).nanoseconds
    alike = price_alike(step, machine)
    ending = _update_in(step)
    update = None if ending is None else searched_update(words, ending)
    if found.alike is None:
        least = min(found.least + alike, float(nanoseconds))
        found = replace(found, nanoseconds=nanoseconds, least=least)
    else:  # a plan that was searched before has the bound of its whole step
        before = found.update or update
        if update is not None and before is not None and update.digest != before.digest and found.least > 0:
            found = replace(found, least=0.0, reason=OF_ANOTHER_STEP.format(update.differs_from(before)))
        found = repriced(found, nanoseconds)
    constrained = found.constrained or _has_given_stage(found.step)
    return timed(replace(found, alike=alike, constrained=constrained, update=update), list(step.runs.values()))


def _has_given_stage(choice: StepChoice | None) -> bool:
    """Return whether a stage of ZeRO was given: it decides layouts of the optimizer's state, gradients and inputs."""
    if choice is None or choice.zero in (0, "search"):
        return False
    return all(row.zero == choice.zero for row in choice.candidates)


def _update_in(step: Programs) -> Program | None:
    """Return the update of a step or a stage; a stage may have none."""
    return step.runs["update"][0] if "update" in step.runs else None


def price_alike(step: Programs, machine: Machine) -> int:
    """Return the nanoseconds of the update's ops on single numbers, which are the same in all plans."""
    update = _update_in(step)
    return sum(
        cost
        for node, cost in (() if update is None else node_prices(update, machine))
        if node.target not in transfers.BY_FUNCTION
        and all(_is_number(value) for value in (record_of(node).type, *(record_of(n).type for n in operands(node))))
    )


def _is_number(type: ValueType) -> bool:
    return all(part is None or not part.shape for part in (type if isinstance(type, tuple) else (type,)))
