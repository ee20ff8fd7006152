"""Cut a model into stages for its calls, without a training step: as balanced as a step cuts it by default."""

from __future__ import annotations

from autopar.ir.layout import Layout
from autopar.ir.mesh import PIPELINE
from autopar.ir.nodes import name_of, record_of
from autopar.model.calls import Calls
from autopar.model.inputs import CallInputs
from autopar.model.stage_homes import StageHomes
from autopar.step.pipelined.cutting.assignment import computed_anywhere, ops_of_forward
from autopar.step.pipelined.cutting.cut import cut_by_cost
from autopar.step.pipelined.cutting.units import units_of
from autopar.step.pipelined.placing.programs import meshes_of


def first_cut(calls: Calls, inputs: CallInputs) -> StageHomes:
    """Return where the parameters are when the call is cut into one stage for each position along the pipeline.

    Each parameter is on the first stage that reads it.

    Raises:
        PlanError: the forward has fewer parts than stages.
    """
    count = calls.mesh.sizes[PIPELINE]
    captured, *_ = calls.compiler.capture(inputs)
    program = captured.program
    anywhere = computed_anywhere(program)
    ops = ops_of_forward(program, anywhere)
    place = cut_by_cost(units_of(program, ops, calls.compiler.planner.machine), count, [1.0] * count)
    first = {node: place(node) or 0 for node in ops}
    for node in reversed([*program.nodes]):  # a view or a cast of a parameter is where it is read
        if node.op == "placeholder" or node in anywhere:
            first[node] = min((first[user] for user in node.users if user in first), default=0)
    stage = {name_of(node): first[node] for node in program.placeholders if record_of(node).role == "param"}
    meshes = meshes_of(calls.mesh, range(count))
    layouts = {name: Layout(meshes[at], calls.binding.layouts[name]) for name, at in stage.items()}
    return StageHomes(calls.mesh, tuple(meshes), stage, layouts)
