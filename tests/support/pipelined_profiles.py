"""On each rank: a profile of a step on stages, and a step by it."""

from __future__ import annotations

from typing import Any

from equality import relative
from pipelined_steps import MESHES, made
from steps import run

from autopar.costs.profile import Profile
from autopar.pipeline import POLICIES, Times
from autopar.runtime.measuring.clock import Effort

SHORT = Effort(warm=1, seconds=0.001, least=1, most=2)


def profiled(name: str, mesh: str, policy: str, **options: Any) -> tuple[Profile, Times]:
    """The profile, and the times of a step that has it, with the numbers of a single device."""
    layers = max(4, MESHES[mesh]["pp"] * POLICIES[policy].default)
    first, _, batches = made(name, MESHES[mesh], policy, 3, layers=layers, **options)
    first.capture(**batches(0))
    profile = first.measure(effort=SHORT)
    first.parallel.close()
    step, alone, batches = made(name, MESHES[mesh], policy, 3, layers=layers, profile=profile, **options)
    assert relative(run(step, batches(0)), alone(**batches(0))[0]) <= 1e-9
    times = step.pipeline.times
    assert step.pipeline.simulate().times == times
    step.parallel.close()
    return profile, times
