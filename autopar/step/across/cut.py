"""Cut an update where collectives may cross the end of a step: what stands behind the cut runs in the next step.

    update:
      w_grad_dp : f32[8 4] = all_reduce(w_grad, dp)          the cut is in front of it: ``w_grad`` is handed over,
      sgd : f32[8 4] = autopar::sgd(w, w_grad_dp, …)         and both lines run in the next step
      w_dp : f32[8 4] = all_gather(sgd, 0, dp)               or, with ZeRO, the cut is here: ``sgd`` is handed over

``across`` decides which of the two cuts is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import name_of, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.value_names import ValueRole, before_name, gradient_parameter, next_values_by_name, roles_in
from autopar.scheduling.programs.functions import is_collective, runs
from autopar.torch_private import aten

ADD = aten.add.Tensor


@dataclass
class Cut:
    """What of an update runs in the next step.

    Attributes:
        finish: the nodes of the update that do.
        handed: value of the update → what it is called between two runs; the next step reads it.
        crossing: the collectives that read these values.
        moved: value of the update → the reduction of ``micro`` that computes it in the next step.
    """

    finish: set[fx.Node] = field(default_factory=set)
    handed: dict[fx.Node, str] = field(default_factory=dict)
    crossing: list[fx.Node] = field(default_factory=list)
    moved: dict[fx.Node, fx.Node] = field(default_factory=dict)


def reductions_cross(micro: Program, update: Program, *, alone: bool) -> Cut:
    """Return the cut in front of the reduction of each gradient. Linear in both programs.

    What the update returns, as the loss, must not depend on gradients.

    Args:
        alone: whether the micro-batch is the only one. Then also a reduction crosses whose result is added to a sum.
    """
    cut, kept = Cut(), _ancestors(update, "return")
    cut.finish = {node for node in update.nodes if runs(node) and node not in kept}
    sums = next_values_by_name(micro)
    for home in update.placeholders:
        parameter = gradient_parameter(name_of(home)) if record_of(home).role == "buffer" else None
        if parameter is None:
            continue
        path = _transfers_of(home)
        last = max((k for k, node in enumerate(path) if _may_cross(node)), default=None)
        handed = home if last is None else operands(path[last])[0]
        cut.handed[handed] = before_name(parameter)
        if last is not None:
            cut.crossing.append(path[last])
            cut.finish.difference_update(path[:last])
        elif alone and (reduction := _late_reduction(sums[name_of(home)])) is not None:
            cut.moved[home] = reduction
            cut.crossing.append(reduction)
    return cut


def gathers_cross(update: Program) -> Cut:
    """Return the cut in front of the gathers of updated parameters, or of their low-precision copies, which nothing
    else reads. Copies that are not gathered are made in the next step. Linear."""
    cut, copied = Cut(), {name for name, (role, _) in roles_in(update).items() if role is ValueRole.COPY}
    names, nexts = {node.name: name_of(node) for node in update.placeholders}, next_values_by_name(update)
    others = set(nexts.values()) - {value for name, value in nexts.items() if name in copied}
    for node, result in zip(operands(update.output), record_of(update.output).results, strict=True):
        gathers = node.target is transfers.all_gather and operands(node)[0].op == "call_function"
        if result.kind != "state" or node in cut.finish:
            continue
        name = names[result.of]
        if gathers and len(node.users) == 1:
            cut.finish.add(node)
            cut.handed[operands(node)[0]] = before_name(name)
            cut.crossing.append(node)
        elif name in copied:
            while runs(node) and node not in others:
                cut.finish.add(node)
                node = operands(node)[0]
    return cut


def _ancestors(program: Program, kind: str) -> set[fx.Node]:
    """Return the nodes that results of a kind depend on."""
    rows = zip(operands(program.output), record_of(program.output).results, strict=True)
    found = {value for value, result in rows if result.kind == kind}
    for node in reversed(list(program.nodes)):
        if node in found:
            found.update(operands(node))
    return found


def _transfers_of(home: fx.Node) -> list[fx.Node]:
    """Return the transfers through which a gradient goes first, one after the other, which nothing else reads."""
    path, node = [], home
    while len(node.users) == 1 and (user := next(iter(node.users))).target in transfers.BY_FUNCTION:
        path.append(user)
        node = user
    return path


def _may_cross(node: fx.Node) -> bool:
    """Return whether a transfer may end in another run than it begins: a redistribute reads its operand at its end."""
    return is_collective(node) and node.target is not transfers.redistribute


def _late_reduction(sum: fx.Node) -> fx.Node | None:
    """Return the reduction whose result is added to a sum of gradients that is zero, as with ZeRO 2, and to nothing
    else; ``None`` if there is none."""
    addend = sum.args[1] if sum.target is ADD and len(operands(sum)) == 2 else None
    if not isinstance(addend, fx.Node) or not _may_cross(addend) or len(addend.users) > 1 or len(sum.users) > 1:
        return None
    return addend if tensor_type(addend) == tensor_type(sum) and operands(addend)[0].op == "call_function" else None
