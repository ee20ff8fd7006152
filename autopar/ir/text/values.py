"""Make the nodes of a program from what its lines say."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.constant import Constant
from autopar.ir.nodes import make_node, record_of, set_record
from autopar.ir.record import DTYPE_NAMES, Record, Requirement, TensorType, ValueType
from autopar.ir.text.definitions import Content, Definition, Element, Issue, Need, OpCall, Operand, Placeholder
from autopar.ir.text.header import Header
from autopar.ir.text.tokens import Cursor, SizeText
from autopar.ir.text.types import given

Uses = tuple[Requirement | None, ...]


class Values:
    """The nodes that were made so far.

    Attributes:
        nodes: by name.
        own: name → the requirement of a use that asks for what the value is.
        constants: by name.
        states: placeholder → its next value, and the line for errors.
        phase: of the lines that come.
    """

    def __init__(self, cursor: Cursor, header: Header) -> None:
        self.cursor, self.header = cursor, header
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.own: dict[str, Requirement | None] = {}
        self.constants: dict[str, Constant] = {}
        self.states: dict[str, tuple[str, tuple[int, str]]] = {}
        self.phase = "forward"

    def make(self, name: str, type: ValueType, own: Requirement | None, definition: Definition, issue: Issue) -> None:
        """Make the node of one line."""
        graph, phase, stream = self.graph, self.phase, issue.stream
        match definition:
            case OpCall(target, args, kwargs):
                uses = self._uses_of(definition)
                if definition.operands or self.header.sizes:
                    args, kwargs = self._filled(args), self._filled(kwargs)
                node = make_node(graph, name, "call_function", target, args, kwargs)
                started = definition.started
                record = Record(type, uses, phase, started=started, **issue._asdict())
            case Element(source, index):
                value, need = self.use(source, self.header.may_require)
                self._check_element(value, index)
                node = make_node(graph, name, "call_function", operator.getitem, (value, index), {})
                record = Record(type, self.recorded([need]), phase, stream=stream)
            case Placeholder(role, after, position, user_name):
                if after:
                    self.states[name] = (after, (self.cursor.number, self.cursor.line))
                node = make_node(graph, name, "placeholder", name, (), {})
                user_name = "" if user_name == name else user_name  # as the printer writes it
                started = role == "state" and stream is not None
                record = Record(type, (), phase, role, position, user_name, started=started, **issue._asdict())
            case Content(content):
                self.constants[name] = self._constant(content, type)
                node = make_node(graph, name, "get_attr", name, (), {})
                record = Record(type, phase=phase, stream=stream)
        set_record(node, record)
        self.nodes[name], self.own[name] = node, own

    def use(self, operand: Operand, may_require: bool) -> tuple[fx.Node, Requirement | None]:
        """Return the value that is used, and what is required of it.

        Args:
            may_require: whether the use may require another Layout or dtype than the value's.
        """
        node = self.nodes.get(operand.name)
        if node is None:
            raise self.cursor.error(f"{operand.name} is read before it is made")
        if operand.need is None:
            return node, self.own[operand.name]
        return node, self._requirement(node, operand.need, may_require)

    def recorded(self, uses: Iterable[Requirement | None]) -> Uses:
        """Return the requirements of a record; none at the level ``traced`` if no operand has one."""
        requirements = tuple(uses)
        return requirements if self.header.has_uses or any(requirements) else ()

    def _uses_of(self, call: OpCall) -> Uses:
        """Return the requirements of the operands; transfers have none, and take one tensor."""
        transfer = call.target in transfers.BY_FUNCTION
        may_require = self.header.may_require and not transfer
        uses = [self.use(operand, may_require)[1] for operand in call.operands]
        if transfer:
            self._check_transfer(call)
        return self.recorded(uses) if may_require else ()

    def _check_transfer(self, call: OpCall) -> None:
        name = call.target.__name__
        if not call.operands:
            if self.header.level not in ("local", "scheduled"):  # there, the value to receive is on other ranks
                raise self.cursor.error(f"{name} takes a value first, as in {name}(x)")
        elif not isinstance(record_of(self.nodes[call.operands[0].name]).type, TensorType):
            raise self.cursor.error(f"{name} takes one tensor; {call.operands[0].name} has several")

    def _check_element(self, source: fx.Node, index: int) -> None:
        types = record_of(source).type
        if not isinstance(types, tuple) or not 0 <= index < len(types):
            count = f"has {len(types)} elements" if isinstance(types, tuple) else "is one tensor and has no elements"
            raise self.cursor.error(f"{source.name} {count}: there is no {source.name}[{index}]")

    def _filled(self, argument: Any) -> Any:
        """Return an argument with nodes in place of operands."""
        kind = argument.__class__
        if kind is Operand:
            return self.nodes[argument.name]
        if kind is SizeText:
            return given(self.cursor, argument, self.header.sizes)
        if kind is tuple or kind is list:
            return kind([self._filled(part) for part in argument])
        if kind is dict:
            return {key: self._filled(part) for key, part in argument.items()}
        return argument

    def _constant(self, content: object, type: ValueType) -> Constant:
        if not isinstance(type, TensorType):
            raise self.cursor.error("a constant is one tensor")
        if isinstance(content, str):
            return Constant(type.shape, type.dtype, content)
        try:
            tensor = torch.tensor(content, dtype=type.dtype)
            tensor = tensor if tensor.numel() else tensor.reshape(type.shape)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self.cursor.error(f"these elements make no tensor: {error}") from None
        if tuple(tensor.shape) != type.shape:
            raise self.cursor.error(
                f"these elements have the shape {list(tensor.shape)}, the type says {list(type.shape)}"
            )
        return Constant(type.shape, type.dtype, content, tensor)

    def _requirement(self, node: fx.Node, need: Need, may_require: bool) -> Requirement:
        error, type, traced = self.cursor.error, record_of(node).type, self.header.level == "traced"
        if not may_require or (traced and need.dtype is None):
            raise error(
                "only ops and results of placed and explicit programs require a Layout with 'as'; transfers accept "
                "any Layout"
            )
        if not isinstance(type, TensorType):
            raise error(f"{node.name} has several tensors; require a Layout of its elements")
        if traced and need.dtype is not None:
            if need.placed is not None:
                raise error(
                    f"a use in a traced program requires a dtype alone, as in "
                    f"'{node.name} as {DTYPE_NAMES[need.dtype]}': place decides its Layout"
                )
            return Requirement(None, need.dtype)
        if need.placed is None:
            raise error(f"a use in a {self.header.level} program requires a Layout too, as in '{node.name} as [4 6]'")
        shape, layout = self.header.resolve(need.placed)
        if shape != type.shape:
            raise error(f"{node.name} has the shape {list(type.shape)}, required is {list(shape)}")
        assert layout is not None
        return Requirement(layout, need.dtype or type.dtype)
