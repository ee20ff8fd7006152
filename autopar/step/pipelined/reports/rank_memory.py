"""Report the memory of one rank of a pipelined step."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from autopar.errors import MemoryLimitError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.notebook import TableReport
from autopar.pipeline.memory import memory
from autopar.search.certificate import bytes_text
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.reports.sizes import as_sizes, sizes_of, stage_sizes


@dataclass(frozen=True, repr=False)
class RankMemory(TableReport):
    """The memory of one rank of a pipelined step, in bytes. Prints as a table.

    Attributes:
        rank: the rank.
        peak: the most bytes in use at once while the slots run.
        held: bytes that stay between steps: parameters, buffers, the optimizer's state, and the batch.
        kept: of these, the bytes of the ``inputs``.
        kinds: the bytes at the peak, by kind.
    """

    rank: int
    peak: int
    held: int
    kept: Mapping[str, int]
    kinds: Mapping[str, int]

    @property
    def made(self) -> int:
        """The most bytes that a step allocates beside those that stay between steps."""
        return self.peak - self.held

    def __str__(self) -> str:
        table = Table("kind", Column("bytes", justify="right"))
        for kind, bytes in self.kinds.items():
            table.add_row(kind, f"{bytes:,}")
        out = io.StringIO()
        Console(file=out, width=80).print(table)
        return f"{out.getvalue()}{self.peak:,} bytes of rank {self.rank} at most, {self.held:,} of them between steps\n"


def memory_of_rank(
    micro: PipelinedMicro, update: StepUpdate, mesh: Mesh, rank: int, offload: bool = False
) -> RankMemory:
    """Return the memory of a rank, which is that of the first rank at its position along the pipeline.

    ``offload``: whether the optimizer's state is in host memory.
    """
    position = mesh.coordinates(rank)[PIPELINE]
    sizes = stage_sizes(micro, update, offload)
    found = memory(micro.schedule, as_sizes(sizes))
    own = [sizes[number] for number in micro.schedule.stages_of[position]]
    kinds = {
        "parameters, state and batch": sum(stage.held for stage in own),
        "sums of gradients": sum(stage.sums for stage in own),
        "copies of parameters": sum(stage.copies for stage in own),
        "outputs": sum(stage.outputs for stage in own),
        **{kind: round(bytes) for kind, bytes in found.at_peak[position].items()},
    }
    kept = {"inputs": sum(stage.inputs for stage in own)}
    return RankMemory(rank, round(found.peak[position]), kinds["parameters, state and batch"], kept, kinds)


def check_within(limit: float | None, micro: PipelinedMicro, update: StepUpdate, offload: bool = False) -> None:
    """Raise ``MemoryLimitError`` if a rank takes more bytes than the option ``memory=`` allows."""
    if limit is None or limit == math.inf:
        return
    peaks = memory(micro.schedule, sizes_of(micro, update, offload)).peak
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
