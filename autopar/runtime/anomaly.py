"""Find the first op that makes a NaN, by a check after each op, when ``torch.autograd.detect_anomaly`` is on.

    h = torch.ops.aten.mm.default(x, w)           h = torch.ops.aten.mm.default(x, w)
    y = torch.ops.aten.log.default(h)       →     look('h', h, (x, w))
                                                  y = torch.ops.aten.log.default(h)
                                                  look('y', y, (h,))

An anomaly is a NaN in the result of an op none of whose operands has a NaN, if it reaches a value that leaves the
computation: a result of the program, a state, a value that is sent to other ranks, or in the backward a value that one
autograd function passes to the next, as torch defines it. The error is raised before that value is sent. A NaN that a
mask removes, as in the gradient of the norm of zeros, is no anomaly, and neither is inf, which masks contain. When
detection is off, it costs nothing: the functions with checks are separate functions, lowered when they are first
needed.

With a scale of the loss (``loss_scaling``) gradients may overflow, and values computed from inf may be NaN. The scale
handles that by skipping the step. So an anomaly of the backward or of the update is then only a NaN computed from
finite operands on this rank; values from other ranks are not checked. The forward does not depend on the scale, and is
checked as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.model_state import ModelState
from autopar.errors import AnomalyError, at_line
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, node_at, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_op, target_name
from autopar.optimizers import IN_PLACE
from autopar.torch_private import aten

LEFT = (
    "its initialisation, a checkpoint or an earlier step left it there; go back to a state without NaN, and run on "
    "with detect_anomaly"
)
REMEDIES = {  # kind of input → the remedy
    "parameter": LEFT,
    "buffer": LEFT,
    "state": LEFT,
    "input": "look at how the batch is made; use torch.nan_to_num, or leave such rows out",
}
MADE = (
    "keep the operands where the op is defined, as with clamp or an epsilon; if there is inf: inf - inf, inf * 0 "
    "and inf / inf are NaN"
)
CAME = "look at the errors of those ranks; if they have none, it is a sum of inf and -inf: find where a rank has inf"


def is_on() -> bool:
    """Return whether torch looks for NaN: ``detect_anomaly()``, or ``set_detect_anomaly(True)``.

    With ``check_nan=False`` it does not.
    """
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


class Hunt:
    """Looks for the first NaN in the runs of a local program.

    Args:
        scaled: whether its gradients are multiplied by a scale, with which they may overflow.

    Attributes:
        during: the part of the step that runs next, ``micro-batch 2 of 4``.
    """

    def __init__(self, program: Program, *, scaled: bool = False) -> None:
        self.program, self.scaled, self.during = program, scaled, ""
        self.nodes = {node.name: node for node in program.nodes}
        self.leaving = _outgoing_values(program)
        self._nan: dict[str, str] = {}  # values that have a NaN now → the error text if their op made it, or else ""
        self._slot, self._nan_of = "", {0: self._nan}

    def enter(self, slot: str, batch: int) -> None:
        """Say in which slot of a pipeline's schedule the next values are made.

        The passes of one micro-batch share their values; between them, those of others run.
        """
        self._slot, self._nan = slot, self._nan_of.setdefault(batch, {})

    def look(self, name: str, value: torch.Tensor, read: Sequence[Any]) -> None:
        """Check a value after its op, or after the wait for its collective.

        Args:
            name: the name of the value in the program.
            read: the operands of its op; an operand that is the value itself was overwritten.

        Raises:
            AnomalyError: the value has a NaN and leaves the computation; names the op that made it.
        """
        self._nan.pop(name, None)
        if not has_nan(value):
            return
        node = self.nodes[name]
        left = [operand for operand in read if isinstance(operand, torch.Tensor) and operand is not value]
        handed_on = any(map(has_nan, left)) or (
            self._may_overflow(node) and (_axes(node) or len(left) < len(read) or not all(map(is_finite, left)))
        )
        self._nan[name] = (
            "" if handed_on else self._text(node, value, dict(zip(operands(op_of(node)), read, strict=True)))
        )
        if node in self.leaving and (text := self._first_cause(node)):
            raise AnomalyError(text)

    def _first_cause(self, node: fx.Node) -> str:
        """Return the error text of the first NaN that a value depends on; empty if no op of this rank made it."""
        causes: set[str] = set()
        open_ = [node]
        while open_:
            value = open_.pop()
            if value.name in self._nan and value.name not in causes:
                causes.add(value.name)
                open_ += operands(op_of(value))
        return next((text for name, text in self._nan.items() if text and name in causes), "")

    def look_at_updates(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], written: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Check the updates of several parameters, after one op has updated them in place.

        Args:
            names: the names of the updates in the program, one per parameter.
            gradients: the gradients as the kernel left them; it may have divided them.
            written: the parameters, and each of their states, as lists of the same length.

        Raises:
            AnomalyError: a parameter, or one of its states, became NaN; names the first one.
        """
        for k, name in enumerate(names):
            node = self.nodes[name]
            for value in (values[k] for values in written):
                if has_nan(value) and not (self._may_overflow(node) and not is_finite(gradients[k])):
                    parameter, gradient, *_ = operands(node)
                    raise AnomalyError(self._text(node, value, {parameter: value, gradient: gradients[k]}))

    def _may_overflow(self, node: fx.Node) -> bool:
        return self.scaled and record_of(node).phase != "forward"

    def _text(self, node: fx.Node, value: torch.Tensor, read: Mapping[fx.Node, Any]) -> str:
        op, record, axes = op_of(node), record_of(node), _axes(op_of(node))
        during = f"the {record.phase}" + f" of {self.during}" * (bool(self.during) and record.phase != "update")
        during = self._slot or ("the end of the step before" if record.phase == "finish" else during)
        of = f" of {_user_name(_first_input(op))}" if op.target in IN_PLACE else ""
        op_text = f"the constant {op.name}" if op.op == "get_attr" else target_name(op.target)
        lines = [
            f"{op_text}{of} makes a NaN on rank {self.program.rank}, in {during}",
            "  " + print_op(self.program, op),
        ]
        lines += [at_line(record.source, record.module)] if record.source else []
        why = self._came_over(op, axes) if axes else "none of its operands has one"
        lines.append(f"  {_count(value)} of {node.name} are NaN; {why}:")
        lines += [
            f"    {_user_name(operand)} {'was overwritten' if tensor is value else _range(tensor)}"
            for operand, tensor in read.items()
            if isinstance(tensor, torch.Tensor)
        ]
        return "\n".join([*lines, f"  {CAME if axes else MADE}"])

    def _came_over(self, op: fx.Node, axes: Sequence[str]) -> str:
        arguments = transfers.arguments(op.target, op.args, op.kwargs)
        group = self.program.meshes[arguments.get("stage")].group(self.program.rank, arguments["axis"])
        others = [str(rank) for rank in group if rank != self.program.rank]
        return (
            f"this rank's piece has none, so it came over {' '.join(axes)} from rank{'s' * (len(others) > 1)} "
            f"{' '.join(others)}"
        )


def _outgoing_values(program: Program) -> set[fx.Node]:
    """Return the values that leave the computation.

    These are results, values that are sent to other ranks, values that the update reads of the phases before it, and
    values that the backward of one call passes to that of another. A value that is added to such a sum is one too,
    because it may become the sum itself.
    """
    leaving: set[fx.Node] = set()
    for node in reversed(list(program.nodes)):
        phase = record_of(node).phase
        for user in node.users:
            sent = user.target in (transfers.send, transfers.recv) or bool(_axes(user))
            added = user in leaving and user.target is aten.add.Tensor and operands(user)[0].op == "placeholder"
            other = record_of(user).phase
            handed = phase == other == "backward" and _call(user) != _call(node)
            if user.op == "output" or sent or added or handed or (other == "update" != phase):
                leaving.add(node)
    return leaving


def _call(node: fx.Node) -> int | None:
    call = record_of(node).call
    return None if call is None else call.number


class Watched(dict[str, Any]):
    """A rank's values by name, which checks each value for NaN when it is set."""

    def __init__(self, values: Mapping[str, Any], hunt: Hunt) -> None:
        super().__init__(values)
        self.hunt = hunt

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        node = self.hunt.nodes[name]
        if is_looked_at(node):
            self.hunt.look(name, value, [self[operand.name] for operand in operands(op_of(node))])


def refuse_nan(module_state: ModelState, model: Mapping[str, torch.Tensor],
               batches: Sequence[Mapping[str, torch.Tensor]], state: Mapping[str, torch.Tensor],
               rank: int | None = None) -> None:  # fmt: skip
    """Check the inputs of a step for NaN.

    Args:
        model: parameters and buffers, by the user's names.
        batches: the inputs of each micro-batch, by name.
        state: the state of the optimizer, by name.
        rank: the rank of these pieces; ``None`` for whole tensors.

    Raises:
        AnomalyError: one of them has a NaN.
    """
    kinds = {name: "parameter" for name, _ in module_state.parameters}
    rows = [(kinds.get(name, "buffer"), name, "", tensor) for name, tensor in model.items()]
    rows += [
        ("input", name, nth(k, len(batches)), tensor)
        for k, batch in enumerate(batches, 1)
        for name, tensor in batch.items()
    ]
    rows += [("state", name, "", tensor) for name, tensor in state.items()]
    for kind, name, microbatch, tensor in rows:
        if has_nan(tensor):
            where = "".join([f" of {microbatch}" if microbatch else "", "" if rank is None else f" on rank {rank}"])
            raise AnomalyError(f"the {kind} {name}{where} comes in with NaN: {_count(tensor)}\n  {REMEDIES[kind]}")


def nth(k: int, count: int) -> str:
    """Return ``micro-batch 2 of 4``; empty if there is only one."""
    return "" if count == 1 else f"micro-batch {k} of {count}"


def op_of(node: fx.Node) -> fx.Node:
    """Return the op that computes a value; of a value that is waited for, the start of its collective."""
    return node_at(node) if is_getitem(node) or node.target is transfers.wait else node


def is_looked_at(node: fx.Node) -> bool:
    """Return whether a value is computed by the program and is one tensor.

    Of an op with several results, each result that is read is checked; of a collective, what is waited for.
    """
    record = record_of(node)
    return node.op in ("call_function", "get_attr") and isinstance(record.type, TensorType) and not record.started


def has_nan(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) and bool(_wide(x).isnan().any())


def is_finite(x: torch.Tensor) -> bool:
    return bool(_wide(x).isfinite().all())


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor, in float32 if it has an eight-bit dtype, which torch's checks do not take."""
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x


def _count(x: torch.Tensor) -> str:
    return f"{int(_wide(x).isnan().sum())} of {x.numel()} elements"


def _range(x: torch.Tensor) -> str:
    """Describe values as ``from -1.5 to 2, 3 inf``, or ``is 3`` for one number.

    Complex numbers are described by their absolute values.
    """
    x = (x.abs() if x.is_complex() else x).double()
    if x.numel() == 1:
        return f"is {x.item():.6g}"
    finite = x[x.isfinite()]
    values = (
        f"from {float(finite.min()):.6g} to {float(finite.max()):.6g}"
        if finite.numel()
        else "has no finite element"
        if x.numel()
        else "is empty"
    )
    infinite = int(x.isinf().sum())
    return f"{values}, {infinite or 'no'} inf"


def _user_name(node: fx.Node) -> str:
    return (node.op == "placeholder" and record_of(node).name) or node.name


def _first_input(node: fx.Node) -> fx.Node:
    """Follow first operands from a value to a placeholder."""
    while node.op != "placeholder" and operands(node):
        node = operands(node)[0]
    return node


def _axes(node: fx.Node) -> tuple[str, ...]:
    """Return the axes of the collective that a value came over; none for other ops."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None or not row.collective:
        return ()
    return transfers.axes_of(transfers.arguments(node.target, node.args, node.kwargs).get("axis") or ())
