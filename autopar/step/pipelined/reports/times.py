"""Take the durations of the passes of a step from the schedules of its programs, for the simulation of its pipeline.

They are by the figures by which the programs are scheduled: those of a machine, or those that ``step.measure()`` has
measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.costs.machine import Machine
from autopar.costs.prices import crossed, exchange_price
from autopar.costs.profile import Profile
from autopar.pipeline.per_stage import Times
from autopar.runtime.lowering.bundles import Bundle
from autopar.runtime.measuring.between_stages import BetweenStages
from autopar.scheduling.programs.order import Order
from autopar.step.pipelined.placing.programs import PipelinedMicro

PASSES = ("forward", "backward")  # in which messages are sent
Sends = Mapping[int, Mapping[int, int]]  # rank → receiver → bytes


def times_of(micro: PipelinedMicro, figures: Machine | Profile, rendezvous: bool) -> Times:
    """Return the seconds of each stage's F, B and W, and of the messages between neighbouring stages.

    A pass takes the makespan of its program. A message takes its measured seconds, or the price of the longest message
    of a rank.

    Args:
        rendezvous: as of ``Times``.
    """
    forward, backward, weight = (
        [_seconds(micro.order_of(stage.number), phase) for stage in micro.stages]
        for phase in (*PASSES, "weight_gradients")
    )
    boundaries = range(len(micro.stages) - 1)
    transfer = [max(_message(micro, b, phase, figures) for phase in PASSES) for b in boundaries]
    return Times(forward, backward, weight, transfer if transfer else 0.0, rendezvous=rendezvous)


def _seconds(order: Order, phase: str) -> float:
    """Return the makespan of a phase of a stage; 0 if it has none."""
    pairs = zip(order.functions, order.schedules, strict=True)
    return sum(schedule.makespan for function, schedule in pairs if phase in function.phases)


def _message(micro: PipelinedMicro, boundary: int, phase: str, figures: Machine | Profile) -> float:
    sends = crossing_bytes(micro, boundary, phase)
    if not isinstance(figures, Profile):
        return message_price(sends, figures)
    row = figures.rows.get(message_text(boundary, phase, sends))
    return message_price(sends, figures.machine) if row is None else row.seconds


def crossing_bytes(micro: PipelinedMicro, boundary: int, phase: str) -> Sends:
    """Return the bytes that each rank of a stage sends over a boundary in a pass."""
    back = phase == "backward"
    values = micro.backward_values(boundary) if back else micro.forward_values(boundary)
    stage = micro.stages[boundary + 1 if back else boundary]
    return {rank: Bundle(values, rank).sends for rank in stage.mesh.ranks}


def messages_of(micro: PipelinedMicro, machine: Machine) -> list[BetweenStages]:
    """Return the messages of each boundary and direction that has any."""
    found = []
    for boundary in range(len(micro.stages) - 1):
        for phase in PASSES:
            sends = crossing_bytes(micro, boundary, phase)
            if any(sends.values()):
                text, price = message_text(boundary, phase, sends), message_price(sends, machine)
                found.append(BetweenStages(text, price, {phase: micro.schedule.batches}, sends))
    return found


def message_price(sends: Sends, machine: Machine) -> float:
    """Return the price of the message that takes longest: a long one, or one between hosts."""
    longest: dict[int, int] = {}
    for sender, receivers in sends.items():
        for receiver, size in receivers.items():
            borders = crossed((sender, receiver), machine.borders)
            longest[borders] = max(longest.get(borders, 0), size)
    prices = [exchange_price("send", (size, 2, borders), 1, machine) for borders, size in longest.items() if size]
    return max(prices, default=0.0)


def message_text(boundary: int, phase: str, sends: Sends) -> str:
    """Return what a profile calls the messages that cross a boundary."""
    ends = (boundary, boundary + 1) if phase == "forward" else (boundary + 1, boundary)
    return f"messages of {_longest(sends)} bytes from stage {ends[0]} to stage {ends[1]}"


def _longest(sends: Sends) -> int:
    return max((size for receivers in sends.values() for size in receivers.values()), default=0)
