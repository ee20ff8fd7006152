"""Make pipeline schedules as data, verify and simulate them, print and draw them.

Read the files in this order. `task` defines what a schedule consists of, `schedule_table` its table, and `events` its
events. `dataflow` says what each pass reads, `buffers` when the buffers of messages are free. `verify` checks a
schedule, `lowering` adds its messages. `per_stage` has times and sizes; `memory` and `simulate` compute with them,
`simulation_data` has the result. `formats/`, `summary`, `picture` and `trace` show schedules and simulations.
`schedule` offers all of that as methods of one class. `policies/` make orders and `rows` makes tables of them;
`optimiser/` searches for better ones, and `bounds` proves lower bounds.

>>> schedule = build("zb-h1", ranks=4, batches=8)
>>> print(schedule.simulate(Times(forward=2, backward=2, weight=1, transfer=0.1)))
"""

from autopar.pipeline.optimiser import Optimised, optimise
from autopar.pipeline.per_stage import Sizes, Times
from autopar.pipeline.policies import POLICIES, build
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.simulate import Simulation
from autopar.pipeline.task import Slot, Task

__all__ = [
    "POLICIES",
    "Optimised",
    "PipelineSchedule",
    "Simulation",
    "Sizes",
    "Slot",
    "Task",
    "Times",
    "build",
    "optimise",
]
