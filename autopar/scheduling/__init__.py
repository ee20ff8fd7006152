"""Schedule communication against computation: decide one order, simulate it, and bound what any order takes.

Read the files in this order. `op` and `graph` define what is scheduled, `lines` what a schedule consists of. `verify`
checks lines, `simulation` and `interference` run them, `memory` counts what is alive, and `bounds` bounds every order
from below. `dispatch`, `buckets`, `priorities` and `list_scheduling` make orders; `policies` lists who uses which.
`longest_tail`, `fusing` and `exact` are the default; `placement` moves starts. `decide` has the function `schedule`,
`scheduled` its result. `tuning` tunes ByteScheduler's sizes, and `trace` writes what Perfetto shows. `programs` does
all this for programs; it alone needs torch.

>>> ops = [Op("backward", "compute", 2.0), Op("reduce", "dp", 4.0, ("backward",)), Op("next", "compute", 2.0)]
>>> made = schedule(ops)
>>> made.makespan, made.bound, made.ratio, made.exposed
(6.0, 6.0, 1.0, 2.0)
"""

from autopar.scheduling.decide import schedule
from autopar.scheduling.lines import Line, Part
from autopar.scheduling.op import Op
from autopar.scheduling.policies import POLICIES, ByteScheduler, Policy
from autopar.scheduling.scheduled import Schedule
from autopar.scheduling.simulation import Simulation, Span, simulate

__all__ = [
    "POLICIES",
    "ByteScheduler",
    "Line",
    "Op",
    "Part",
    "Policy",
    "Schedule",
    "Simulation",
    "Span",
    "schedule",
    "simulate",
]
