"""Anomalies: the first op that makes a NaN, found behind each op of a run, where ``torch.autograd.detect_anomaly`` asks for it.

    h = torch.ops.aten.mm.default(x, w)           h = torch.ops.aten.mm.default(x, w)
    y = torch.ops.aten.log.default(h)       →     look('h', h, (x, w))
                                                  y = torch.ops.aten.log.default(h)
                                                  look('y', y, (h,))

An anomaly is a NaN in the result of an op none of whose operands has one, if it gets into something that leaves: what the program
returns, a state, what is sent to other ranks, and in the backward what one function of autograd hands to the next, as torch has it. It is
told then, before that is sent; a NaN that a mask takes away, as in the gradient of the norm of zeros, is none. Nor is inf: masks are made
of it. Where nobody asks, there are neither these lines nor a question in their place: the functions that look are others, made when they
are first needed.

Under a scale of the loss (``loss_scaling``) gradients may overflow, and what is made of inf may be NaN. That is what the scale is for: the
step is skipped. So there an anomaly of the backward or of the update is a NaN made of finite operands, on this rank; what comes from
other ranks is not judged. The forward knows nothing of the scale, and is judged as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.model_state import Inventory
from autopar.errors import AnomalyError, at_line
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_node, target_name
from autopar.optimizers import IN_PLACE

LEFT = "its initialisation, a checkpoint or an earlier step left it there; go back to a state without, and run on with detect_anomaly"
REMEDIES = {  # what comes in → the remedy
    "parameter": LEFT,
    "buffer": LEFT,
    "state": LEFT,
    "input": "look at how the batch is made; torch.nan_to_num, or leave such rows out",
}
MADE = "keep the operands where the op is defined, as with clamp or an epsilon; and of inf, inf - inf, inf * 0 and inf / inf are NaN"
CAME = "see what those ranks say; if they say nothing, it is a sum of inf and -inf: see where a rank has inf"


def is_on() -> bool:
    """Whether torch looks for NaN: under ``torch.autograd.detect_anomaly()`` or ``set_detect_anomaly(True)``, but for ``check_nan=False``."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


class Hunt:
    """Looks for the first NaN in the runs of a local program.

    Args:
        scaled: its gradients are multiples by a scale, under which they may overflow.
        during: of what its next run is a part, ``micro-batch 2 of 4``.
    """

    def __init__(self, program: Program, *, scaled: bool = False, during: str = "") -> None:
        self.program, self.scaled, self.during = program, scaled, during
        self.nodes = {node.name: node for node in program.nodes}
        self.leaving = _leaving(program)
        self._nan: dict[str, str] = {}  # values that have one now → what is told of it, where their op made it

    def look(self, name: str, value: torch.Tensor, read: Sequence[Any]) -> None:
        """Behind an op, or a collective that was waited for.

        Args:
            name: of the value in the program.
            read: the operands of its op; one that is the value itself was written over.

        Raises:
            AnomalyError: the value leaves, and has a NaN; it tells the op that made it.
        """
        self._nan.pop(name, None)
        if not has_nan(value):
            return
        node = self.nodes[name]
        left = [one for one in read if isinstance(one, torch.Tensor) and one is not value]
        handed_on = any(map(has_nan, left)) or (self._may_overflow(node) and (_axes(node) or len(left) < len(read) or not all(map(is_finite, left))))
        self._nan[name] = "" if handed_on else self._text(node, value, dict(zip(operands(op_of(node)), read, strict=True)))
        if node in self.leaving and (told := self._made_by(node)):
            raise AnomalyError(told)

    def _made_by(self, node: fx.Node) -> str:
        """What is told of the first NaN that a value comes from; nothing where none was made here."""
        behind: set[str] = set()
        open_ = [node]
        while open_:
            one = open_.pop()
            if one.name in self._nan and one.name not in behind:
                behind.add(one.name)
                open_ += operands(op_of(one))
        return next((told for name, told in self._nan.items() if told and name in behind), "")

    def look_at_updates(self, names: Sequence[str], gradients: Sequence[torch.Tensor], written: Sequence[Sequence[torch.Tensor]]) -> None:
        """Behind the updates of several parameters at once, in place.

        Args:
            names: of the updates in the program, one a parameter.
            gradients: as the kernel left them, which may have divided them.
            written: the parameters, and states of them: lists as long.

        Raises:
            AnomalyError: it names the first parameter that became NaN, or a state of which did.
        """
        for k, name in enumerate(names):
            node = self.nodes[name]
            for value in (some[k] for some in written):
                if has_nan(value) and not (self._may_overflow(node) and not is_finite(gradients[k])):
                    parameter, gradient, *_ = operands(node)
                    raise AnomalyError(self._text(node, value, {parameter: value, gradient: gradients[k]}))

    def _may_overflow(self, node: fx.Node) -> bool:
        return self.scaled and record_of(node).phase != "forward"

    def _text(self, node: fx.Node, value: torch.Tensor, read: Mapping[fx.Node, Any]) -> str:
        op, record, axes = op_of(node), record_of(node), _axes(node)
        during = f"the {record.phase}" + f" of {self.during}" * (bool(self.during) and record.phase != "update")
        of = f" of {_user_name(_first_input(op))}" if op.target in IN_PLACE else ""
        what = f"the constant {op.name}" if op.op == "get_attr" else target_name(op.target)
        lines = [f"{what}{of} makes a NaN on rank {self.program.rank}, in {during}", "  " + print_node(self.program, op)]
        lines += [at_line(record.source, record.module)] if record.source else []
        why = self._came_over(op, axes) if axes else "none of its operands has one"
        lines.append(f"  {_count(value)} of {node.name} are NaN; {why}:")
        lines += [f"    {_user_name(operand)} {'was written over' if one is value else _range(one)}" for operand, one in read.items() if isinstance(one, torch.Tensor)]
        return "\n".join([*lines, f"  {CAME if axes else MADE}"])

    def _came_over(self, op: fx.Node, axes: Sequence[str]) -> str:
        given = transfers.arguments(op.target, op.args, op.kwargs)
        group = self.program.meshes[given.get("stage")].group(self.program.rank, given["axis"])
        others = [str(rank) for rank in group if rank != self.program.rank]
        return f"this rank's piece has none, so it came over {' '.join(axes)} from rank{'s' * (len(others) > 1)} {' '.join(others)}"


def _leaving(program: Program) -> set[fx.Node]:
    """The values that are seen outside of what computes them: results, what other ranks are sent, what the update reads of the phases
    before it, and what the backward of one call hands to that of another; and what is added to a sum of these, which may be the sum itself."""
    found: set[fx.Node] = set()
    for node in reversed(list(program.nodes)):
        phase = record_of(node).phase
        for user in node.users:
            sent = user.target in (transfers.send, transfers.recv) or bool(_axes(user))
            added = user in found and user.target is torch.ops.aten.add.Tensor and operands(user)[0].op == "placeholder"
            other = record_of(user).phase
            handed = phase == other == "backward" and _call(user) != _call(node)
            if user.op == "output" or sent or added or handed or (other == "update" != phase):
                found.add(node)
    return found


def _call(node: fx.Node) -> int | None:
    call = record_of(node).call
    return None if call is None else call.number


class Watched(dict[str, Any]):
    """A rank's values by name, of which each is looked at when it is written."""

    def __init__(self, values: Mapping[str, Any], hunt: Hunt) -> None:
        super().__init__(values)
        self.hunt = hunt

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        node = self.hunt.nodes[name]
        if is_looked_at(node):
            self.hunt.look(name, value, [self[operand.name] for operand in operands(op_of(node))])


def refuse_nan(own: Inventory, model: Mapping[str, torch.Tensor], batches: Sequence[Mapping[str, torch.Tensor]], state: Mapping[str, torch.Tensor],
               rank: int | None = None) -> None:  # fmt: skip
    """Look at what comes into a step.

    Args:
        model: parameters and buffers; ``batches``: the inputs of each micro-batch; ``state``: of the optimizer; all by the user's names.
        rank: whose pieces these are; ``None`` where they are whole.

    Raises:
        AnomalyError: one of them has a NaN.
    """
    kinds = {name: "parameter" for name, _ in own.parameters}
    rows = [(kinds.get(name, "buffer"), name, "", tensor) for name, tensor in model.items()]
    rows += [("input", name, nth(k, len(batches)), tensor) for k, batch in enumerate(batches, 1) for name, tensor in batch.items()]
    rows += [("state", name, "", tensor) for name, tensor in state.items()]
    for kind, name, of, tensor in rows:
        if has_nan(tensor):
            where = "".join([f" of {of}" if of else "", "" if rank is None else f" on rank {rank}"])
            raise AnomalyError(f"the {kind} {name}{where} comes in with NaN: {_count(tensor)}\n  {REMEDIES[kind]}")


def nth(k: int, count: int) -> str:
    """``micro-batch 2 of 4``; nothing where there is one."""
    return "" if count == 1 else f"micro-batch {k} of {count}"


def op_of(node: fx.Node) -> fx.Node:
    """The op of which a value is a result."""
    return node.args[0] if is_getitem(node) else node  # type: ignore[return-value]


def is_looked_at(node: fx.Node) -> bool:
    """Whether a value is made by the program, and one tensor: of several results each is looked at, if it is read."""
    return node.op in ("call_function", "get_attr") and isinstance(record_of(node).type, TensorType)


def has_nan(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) and bool(_wide(x).isnan().any())


def is_finite(x: torch.Tensor) -> bool:
    return bool(_wide(x).isfinite().all())


def _wide(x: torch.Tensor) -> torch.Tensor:
    """As it is, or in float32 where eight bits are too few for torch's ops."""
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x


def _count(x: torch.Tensor) -> str:
    return f"{int(_wide(x).isnan().sum())} of {x.numel()} elements"


def _range(x: torch.Tensor) -> str:
    """``from -1.5 to 2, 3 inf``, or of one number that; of complex numbers, their size."""
    x = (x.abs() if x.is_complex() else x).double()
    if x.numel() == 1:
        return f"is {x.item():.6g}"
    finite = x[x.isfinite()]
    values = f"from {float(finite.min()):.6g} to {float(finite.max()):.6g}" if finite.numel() else "has no finite element" if x.numel() else "is empty"
    infinite = int(x.isinf().sum())
    return f"{values}, {infinite or 'no'} inf"


def _user_name(node: fx.Node) -> str:
    return (node.op == "placeholder" and record_of(node).name) or node.name


def _first_input(node: fx.Node) -> fx.Node:
    """The input that a value is, or of which its first operand is made."""
    while node.op != "placeholder" and operands(node):
        node = operands(node)[0]
    return node


def _axes(node: fx.Node) -> tuple[str, ...]:
    """Over which a value came; none where it was made here."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None or not row.collective:
        return ()
    return transfers.axes_of(transfers.arguments(node.target, node.args, node.kwargs).get("axis") or ())
