"""Pipeline schedules as data: made by policies, verified, simulated, printed and drawn.

>>> schedule = build("zb-h1", ranks=4, batches=8)
>>> print(schedule.simulate(Times(forward=2, backward=2, weight=1, transfer=0.1)))
"""

from autopar.pipeline.memory import Sizes
from autopar.pipeline.optimiser import Optimised, optimise
from autopar.pipeline.policies import POLICIES, build
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.simulate import Simulation, Times
from autopar.pipeline.task import Slot, Task

__all__ = ["POLICIES", "Optimised", "PipelineSchedule", "Simulation", "Sizes", "Slot", "Task", "Times", "build", "optimise"]
