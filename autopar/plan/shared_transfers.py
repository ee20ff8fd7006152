"""Say which equal transfers of one value are one transfer of the program: in one phase, or in all.

Transfers are not shared across phases: the backward gathers again what the forward gathered, so that it need not be
kept. There are three exceptions. A value that the forward reduced is kept, because it is no larger than the partial
sums that would be kept instead; so is what leads to the reduction, which is done once. So is a value that the forward
cast to fewer bytes, except parameters and inputs, which are kept anyway. And so are the gathered parameters of the
block with which the forward ends and the backward begins.
"""

from __future__ import annotations

from torch import fx

from autopar.capture.blocks import block_of, is_parameter, reader_of
from autopar.ir import transfers
from autopar.ir.nodes import called_op, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import LOSS, gradient_parameter
from autopar.rules.registry import RULES

REDUCTIONS = (transfers.all_reduce, transfers.reduce_scatter)


def computed(value: fx.Node) -> bool:
    """Return whether an op makes a value: it is no placeholder or constant, and no view or transfer of one."""
    while value.op == "call_function" and (
        value.target in transfers.BY_FUNCTION or ((rule := RULES.get(called_op(value))) and rule.view)
    ):
        (value,) = operands(value)
    return value.op == "call_function"


def narrows(source: TensorType, result: TensorType) -> bool:
    """Return whether a cast reduces the bytes of a value."""
    return result.dtype.itemsize < source.dtype.itemsize


def turning_block(program: Program) -> str | None:
    """Return the path of the block, or of the module outside of blocks, of the last op that reads a parameter.

    It is that of the forward; ``None`` if the forward reads none. The backward begins with this block.
    """
    block, last = block_of(program), None
    for node in program.nodes:
        if node.op == "call_function" and record_of(node).phase == "forward" and any(map(_is_weight, operands(node))):
            last = node
    return None if last is None else block(reader_of(last))


def _is_weight(value: fx.Node) -> bool:
    """Return whether a value is a parameter, and not a sum of gradients or losses."""
    if not is_parameter(value):
        return False
    placeholder = value if value.op == "placeholder" else operands(value)[0]
    name = name_of(placeholder)
    return name != LOSS and gradient_parameter(name) is None
