"""Pipeline schedules as data: made by policies, verified, simulated, printed and drawn.

Read in this order: `task` (what a schedule is made of), `schedule` (the table), `events`; `policies/` makes orders, `rows` a table
of them, `lowering` its messages; `dataflow` says what each pass reads, `buffers` when messages may be forgotten; `verify` judges,
`per_stage` holds times and sizes, `memory` and `simulate` count with them; `optimiser/` searches and `bounds` proves; `formats/`,
`summary`, `picture`, `trace` show.

>>> schedule = build("zb-h1", ranks=4, batches=8)
>>> print(schedule.simulate(Times(forward=2, backward=2, weight=1, transfer=0.1)))
"""

from autopar.pipeline.optimiser import Optimised, optimise
from autopar.pipeline.per_stage import Sizes, Times
from autopar.pipeline.policies import POLICIES, build
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.simulate import Simulation
from autopar.pipeline.task import Slot, Task

__all__ = ["POLICIES", "Optimised", "PipelineSchedule", "Simulation", "Sizes", "Slot", "Task", "Times", "build", "optimise"]
