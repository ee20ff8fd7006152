"""Schedule communication against computation: decide one order, simulate it, and bound what any order takes.

Read the files in this order. `op` and `graph` define the ops, `lines` the lines of a schedule. `verify` checks lines,
`simulation` and `interference` simulate them, `memory` counts the bytes that are alive, and `bounds` and
`startup_bound` bound every order from below. `dispatch`, `buckets`, `priorities` and `list_scheduling`, with its
`rule`, make orders; `policies` lists the policies. `longest_tail`, `fusing`, `placement` and `exact` make up the
default; `late_streams` adds a second stream. `decide` has the function `schedule`, `scheduled` its result. `cpsat` is
an oracle for few ops. `tuning` tunes ByteScheduler's sizes, and `trace` writes traces for Perfetto. `programs`
schedules programs; it alone needs torch.

>>> ops = [Op("backward", "compute", 2.0), Op("reduce", "dp", 4.0, ("backward",)), Op("next", "compute", 2.0)]
>>> made = schedule(ops)
>>> made.makespan, made.bound, made.ratio, made.exposed
(6.0, 6.0, 1.0, 2.0)
"""

from autopar.scheduling.decide import schedule
from autopar.scheduling.lines import Line, Part
from autopar.scheduling.op import Op
from autopar.scheduling.policies import POLICIES, ByteScheduler, Policy
from autopar.scheduling.simulation import Schedule, Simulation, Span, simulate

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
