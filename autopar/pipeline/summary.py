"""Print a simulation as a table with one row for each rank."""

from __future__ import annotations

from rich.table import Column, Table

from autopar.notebook import printed
from autopar.pipeline.memory import KINDS
from autopar.pipeline.simulation_data import SimulationData

HEADINGS = {"activations": "activations", "sends": "send buffers", "receives": "receive buffers"}


def summary(simulation: SimulationData) -> str:
    """Return the bubble by makespan and by the longest span, and for each rank work, waiting time and memory."""
    schedule, memory = simulation.schedule, simulation.memory
    columns = ("rank", "stages", "work", "idle", "exposed", "live", "peak", *(HEADINGS[kind] for kind in KINDS))
    table = Table(*(Column(name, justify="left" if name == "stages" else "right") for name in columns))
    for rank, stages in enumerate(schedule.stages_of):
        work = simulation.work[rank]
        table.add_row(
            str(rank), " ".join(map(str, stages)), _number(work), _number(simulation.makespan - work),
            _number(simulation.exposed[rank]), _number(memory.live[rank]), _number(memory.peak[rank]),
            *(_number(memory.at_peak[rank][kind]) for kind in KINDS),
        )  # fmt: skip
    return (
        f"{schedule.title}: makespan {_number(simulation.makespan)}, bubble {_number(simulation.bubble)} "
        f"({simulation.bubble_rate:.2%});\n"
        f"longest span of a rank {_number(simulation.span)}, bubble {_number(simulation.span_bubble)} "
        f"({simulation.span_bubble_rate:.2%}); exposed transfers {_number(sum(simulation.exposed))}\n{printed(table)}"
    )


def _number(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
