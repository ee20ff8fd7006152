"""Take the times and bytes of a block of a model from its plan, for a pipeline on paper."""

from __future__ import annotations

import math

from torch import fx

from autopar.costs.prices import price
from autopar.costs.program_price import node_prices
from autopar.errors import PlanError
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Result, TensorType
from autopar.report.liveness import is_view
from autopar.search.devices.stages import Block
from autopar.search.solutions.solution import Solution

STATES = 2  # of a parameter's size stay all the time: the parameter and the sum of its gradients


def block_of(solution: Solution, *, outside: bool = False, states: float = STATES) -> Block:
    """Return what a block takes, from the plan of its call with the input of one micro-batch.

    The input requires a gradient, as behind another block: then the backward ops that its gradient needs are B, and the
    others are W. Otherwise all are W, as in the first block of a model.

    Args:
        outside: whether messages to the next block leave the node.
        states: how many times the bytes of the parameters stay all the time: with Adam's state 4.

    Raises:
        PlanError: the plan is of a training step, or was not applied in this process.
    """
    if solution.priced is None or solution.kind != "call":
        raise PlanError(
            "a block is a call whose plan is applied in this process: take parallelize(block, mesh, example=(x,))"
            ".solution, where x requires a gradient"
        )
    ((_, program),) = solution.priced.programs
    prices = dict(node_prices(program, solution.machine))
    for_input = _needed_by_gradients_of_inputs(program)
    seconds = {"F": 0, "B": 0, "W": 0}
    for node, cost in prices.items():
        kind = "F" if record_of(node).phase == "forward" else "B" if node in for_input else "W"
        seconds[kind] += cost
    message = max((_bytes(node) for node, result in _results(program) if result.kind == "return"), default=0)
    transfer = price("send", message, 2, solution.machine, shape=(1, 2) if outside else (2, 1)) if message else 0.0
    parameters = sum(_bytes(node) for node in program.placeholders if record_of(node).role == "param")
    return Block(
        seconds["F"] / 1e9, seconds["B"] / 1e9, seconds["W"] / 1e9, transfer, _kept(program), message,
        states * parameters,
    )  # fmt: skip


def _results(program: Program) -> list[tuple[fx.Node, Result]]:
    """Return what a program returns, with its role."""
    (output,) = (node for node in program.nodes if node.op == "output")
    return list(zip(operands(output), record_of(output).results, strict=True))


def _needed_by_gradients_of_inputs(program: Program) -> set[fx.Node]:
    """Return the ops that the gradients of inputs depend on."""
    inputs = {node.name for node in program.placeholders if record_of(node).role == "input"}
    open_ = [node for node, result in _results(program) if result.kind == "grad" and result.of in inputs]
    needed: set[fx.Node] = set()
    while open_:
        node = open_.pop()
        if node not in needed:
            needed.add(node)
            open_ += node.all_input_nodes
    return needed


def _kept(program: Program) -> int:
    """Return the bytes of a rank that the forward keeps for the backward: each value once, views not."""
    kept: set[fx.Node] = set()
    for node in program.nodes:
        if node.op == "call_function" and record_of(node).phase == "backward":
            kept.update(_owner(operand) for operand in node.all_input_nodes if _is_of_forward(operand))
    return sum(_bytes(node) for node in kept if record_of(node).role != "param")


def _is_of_forward(node: fx.Node) -> bool:
    record = record_of(node)
    return record.phase == "forward" if node.op == "call_function" else record.role == "input"


def _owner(node: fx.Node) -> fx.Node:
    """Return the value whose memory a value shares."""
    while node.op == "call_function" and not is_getitem(node) and is_view(node.target):
        node = operands(node)[0]
    return node


def _bytes(node: fx.Node) -> int:
    """Return the bytes of the first rank's piece."""
    type = record_of(node).type
    if not isinstance(type, TensorType):
        return 0
    mesh = None if type.layout is None else type.layout.mesh
    shape = type.shape if mesh is None else type.attr.local_shape(type.shape, mesh, dict.fromkeys(mesh.sizes, 0))
    return math.prod(shape) * type.dtype.itemsize
