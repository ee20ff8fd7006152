"""Collect what a page shows: the programs of a call or a step, and the reports about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costs.machine import Machine
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.text.printer import print_type
from autopar.pipeline.simulation_data import SimulationData
from autopar.report.memory import MemoryReport
from autopar.report.passes import Reports
from autopar.scheduling.programs.communication import Communication
from autopar.search.solutions.solution import Solution
from autopar.search.solutions.tables import Explanation
from autopar.traces import Track


@dataclass(frozen=True)
class Part:
    """One explicit program.

    Attributes:
        name: ``call``, ``micro``, ``update``, ``stage 0 update``.
        program: the explicit program.
        times: how often one call or step runs it.
    """

    name: str
    program: Program
    times: int = 1


@dataclass(frozen=True)
class Alternative:
    """Another plan, and what it costs.

    Attributes:
        name: such as ``megatron``.
        seconds: its price; ``None`` if it cannot be placed.
        memory: bytes of a rank at the peak.
        note: why it cannot be placed, or a remark.
    """

    name: str
    seconds: float | None
    memory: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Messages:
    """What one stage of a pipeline sends to a neighbour in a step.

    Attributes:
        stage: the number of the sender.
        phase: ``forward`` to the next stage, ``backward`` to the one before.
        times: the number of messages.
        bytes: of all messages, of the whole values.
        seconds: of all messages, as they are simulated.
    """

    stage: int
    phase: str
    times: int
    bytes: int
    seconds: float


SHOWN = 3  # inputs that a title names


def batch_text(program: Program) -> str:
    """Return the inputs of a program with their whole shapes: ``ids i64[8 64], labels i64[8 64]``."""
    inputs = [n for n in program.placeholders if record_of(n).role == "input" and not name_of(n).startswith(".")]
    words = [f"{name_of(node)} {print_type(replace(tensor_type(node), layout=None))}" for node in inputs[:SHOWN]]
    return ", ".join(words) + ", …" * (len(inputs) > SHOWN)


@dataclass(frozen=True)
class Subject:
    """What a page shows. ``Parallel`` and ``TrainStep`` make it.

    Attributes:
        title: the name of the model, what runs, and of which batch.
        runs: what has the price, in words: ``a call``, ``a step of 2 micro-batches``.
        mesh: the whole mesh.
        machine: the machine whose seconds are added up.
        parts: the explicit programs, in the order in which they run.
        reports: what each pass did.
        memory: of the rank with the largest pieces.
        seconds: of one call or step, where it is not the sum of its parts, as with stages; else ``None``.
        solution: the searched plan, if it was searched.
        communication: the schedule of the communication; ``None`` where a pipeline's schedule takes its place.
        pipeline: the simulated slots of a pipelined step.
        messages: what its stages send to each other in their passes.
        between: programs of all stages, whose transfers between stages are listed, too; ``parts`` has the others.
        recorded: what ran, one track for each rank.
        alternatives: other plans.
        explained: what each layout of some values would cost.
        notes: remarks that belong to no pass.
    """

    title: str
    runs: str
    mesh: Mesh
    machine: Machine
    parts: Sequence[Part]
    reports: Reports
    memory: MemoryReport
    seconds: float | None = None
    solution: Solution | None = None
    communication: Communication | None = None
    pipeline: SimulationData | None = None
    messages: Sequence[Messages] = ()
    between: Sequence[Part] = ()
    recorded: Sequence[Track] = ()
    alternatives: Sequence[Alternative] = ()
    explained: Sequence[Explanation] = ()
    notes: Sequence[str] = ()
