"""Certify the plan of a whole step: its price, and a lower bound for the micro-batches and the update together."""

from __future__ import annotations

from dataclasses import replace

from autopar.costs.machine import Machine
from autopar.costs.program_price import node_prices, price
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.record import ValueType
from autopar.model.taken_plan import repriced
from autopar.search.solutions.searched_update import searched_update
from autopar.search.solutions.solution import Solution, timed
from autopar.search.solutions.step_choice import StepChoice
from autopar.step.program import Step

OF_ANOTHER_STEP = "the plan was searched for a step with another update ({}), so nothing is proven"


def solution_of(found: Solution, step: Step, words: str) -> Solution:
    """Return the plan of a step, priced as its explicit programs.

    The search has priced the micro-batches, the reductions of gradients and the ops of the update. Ops on single
    numbers, such as counts of steps, are the same in all plans, so the bound has them too. A plan that was searched for
    a step with another update has no bound here.

    Args:
        words: the optimizer and the options of the step, such as ``AdamW, clip_norm=1.0``.
    """
    machine = found.machine
    nanoseconds = price(step, machine).nanoseconds
    alike = price_alike(step, machine)
    update = searched_update(words, step.update)
    if found.alike is None:
        least = min(found.least + alike, float(nanoseconds))
        found = replace(found, nanoseconds=nanoseconds, least=least)
    else:  # a plan that was searched before has the bound of its whole step
        before = found.update or update
        if update.digest != before.digest and found.least > 0:
            found = replace(found, least=0.0, reason=OF_ANOTHER_STEP.format(update.differs_from(before)))
        found = repriced(found, nanoseconds)
    constrained = found.constrained or _has_given_stage(found.step)
    return timed(replace(found, alike=alike, constrained=constrained, update=update), list(step.runs.values()))


def _has_given_stage(choice: StepChoice | None) -> bool:
    """Return whether a stage of ZeRO was given: it decides layouts of the optimizer's state, gradients and inputs."""
    if choice is None or choice.zero in (0, "search"):
        return False
    return all(row.zero == choice.zero for row in choice.candidates)


def price_alike(step: Step, machine: Machine) -> int:
    """Return the nanoseconds of the update's ops on single numbers, which are the same in all plans."""
    return sum(
        cost
        for node, cost in node_prices(step.update, machine)
        if node.target not in transfers.BY_FUNCTION
        and all(_is_number(value) for value in (record_of(node).type, *(record_of(n).type for n in operands(node))))
    )


def _is_number(type: ValueType) -> bool:
    return all(part is None or not part.shape for part in (type if isinstance(type, tuple) else (type,)))
