"""Report the memory of one rank of a pipelined step."""

from __future__ import annotations

import math
from collections import Counter

from autopar.errors import MemoryLimitError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.pipeline.memory import memory as memory_of_slots
from autopar.report.memory import PhasePeak
from autopar.search.certificate import bytes_text
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.reports.sizes import as_sizes, sizes_of, stage_sizes
from autopar.step.reports.memory import StageMemory

SLOTS = "the slots"


def memory_of_rank(
    micro: PipelinedMicro, update: StepUpdate, mesh: Mesh, rank: int, offload: bool = False
) -> StageMemory:
    """Return the memory of a rank, which is that of the first rank at its position along the pipeline.

    ``offload``: whether the optimizer's state is in host memory.
    """
    position = mesh.coordinates(rank)[PIPELINE]
    sizes = stage_sizes(micro, update, offload)
    found = memory_of_slots(micro.schedule, as_sizes(sizes))
    own = [sizes[number] for number in micro.schedule.stages_of[position]]
    kinds = {
        "parameters, state and batch": sum(stage.held for stage in own),
        "sums of gradients": sum(stage.sums for stage in own),
        "copies of parameters": sum(stage.copies for stage in own),
        "outputs": sum(stage.outputs for stage in own),
        **{kind: round(bytes) for kind, bytes in found.at_peak[position].items()},
    }
    memory = StageMemory([PhasePeak(SLOTS, round(found.peak[position]), "", "", "", kinds, (), ())])
    memory.rank, memory.held = rank, kinds["parameters, state and batch"]
    memory.kept = Counter(inputs=sum(stage.inputs for stage in own))
    return memory


def check_within(limit: float | None, micro: PipelinedMicro, update: StepUpdate, offload: bool = False) -> None:
    """Raise ``MemoryLimitError`` if a rank takes more bytes than the option ``memory=`` allows."""
    if limit is None or limit == math.inf:
        return
    peaks = memory_of_slots(micro.schedule, sizes_of(micro, update, offload)).peak
    position = max(range(len(peaks)), key=peaks.__getitem__)
    if (peak := peaks[position]) > limit:
        stages = ", ".join(map(str, micro.schedule.stages_of[position]))
        error = MemoryLimitError(
            f"{micro.schedule.title} takes {bytes_text(peak)} of a rank of stage {stages}, {bytes_text(peak - limit)} "
            f'more than memory={limit:g} allows\n  recompute more (recompute="blocks"), cut into more stages, use a '
            f"schedule that keeps fewer micro-batches (step.pipeline.simulate() shows the memory of each), or give a "
            f"larger memory="
        )
        error.bytes = peak
        raise error
