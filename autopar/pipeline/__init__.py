"""Pipeline schedules as data: made by policies, verified, simulated, printed and drawn."""

from autopar.pipeline.policies import POLICIES, build
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.task import Slot, Task

__all__ = ["POLICIES", "PipelineSchedule", "Slot", "Task", "build"]
