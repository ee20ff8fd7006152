"""Take the durations of the passes of a step from the schedules of its programs, for the simulation of its pipeline."""

from __future__ import annotations

from autopar.costs.machine import Machine
from autopar.costs.prices import price
from autopar.pipeline.per_stage import Times
from autopar.step.pipelined.placing.bundles import Bundle
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage


def times_of(micro: PipelinedMicro, machine: Machine, rendezvous: bool) -> Times:
    """Return the seconds of each stage's F, B and W, and of the messages between neighbouring stages.

    A pass takes the makespan of its program. A message takes the price of the longest message of a rank.

    Args:
        rendezvous: as of ``Times``.
    """
    forward, backward, weight = (
        [_seconds(stage, phase) for stage in micro.stages] for phase in ("forward", "backward", "weight_gradients")
    )
    boundaries = range(len(micro.stages) - 1)
    transfer = [max(_message(micro, b, machine, back) for back in (False, True)) for b in boundaries]
    return Times(forward, backward, weight, transfer if transfer else 0.0, rendezvous=rendezvous)


def _seconds(stage: Stage, phase: str) -> float:
    """Return the makespan of a phase of a stage; 0 if it has none."""
    order = stage.local.order
    assert order is not None
    pairs = zip(order.functions, order.schedules, strict=True)
    return sum(schedule.makespan for function, schedule in pairs if phase in function.phases)


def _message(micro: PipelinedMicro, boundary: int, machine: Machine, back: bool) -> float:
    values = micro.backward_values(boundary) if back else micro.forward_values(boundary)
    stage = micro.stages[boundary + 1 if back else boundary]
    bytes = max((size for rank in stage.mesh.ranks for size in Bundle(values, rank).sends.values()), default=0)
    return price("send", bytes, 2, machine, shape=(2, 1)) if bytes else 0.0
