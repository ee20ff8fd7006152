"""Parse the text of a program, by recursive descent over one line at a time. ``GRAMMAR.md`` has the grammar."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

from autopar.errors import TextError
from autopar.ir import transfers
from autopar.ir.constant import Constant
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of, set_record
from autopar.ir.program_data import LEVELS, ProgramData
from autopar.ir.record import DTYPE_NAMES, PHASES, ROLES, Record, Requirement, Result, TensorType, ValueType
from autopar.ir.text.overloads import misplaced
from autopar.ir.text.tokens import RESERVED, WORDS, can_name
from autopar.ir.text.types import TypeReader
from autopar.torch_private import OpOverload

P = TypeVar("P", bound=ProgramData)


def parse_program(text: str, make: type[P]) -> P:
    """Return what ``make`` builds of a text; ``TextError`` names the line and what is wrong with it."""
    return _Parser(text).program(make)


class _Parser(TypeReader):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.streams: list[str] = []
        self.coordinates: dict[str, int] | None = None
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self.constants: dict[str, Constant] = {}
        self.phase = PHASES[0]
        self.tree: tuple[str, ...] = ()
        self.uses: list[Requirement | None] = []  # requirements of the line being read
        self.may_have_as = False  # whether 'as' may follow the operands of this line
        self.returns: list[tuple[Result, fx.Node, Requirement | None]] = []
        self.grads: list[tuple[Result, fx.Node, Requirement | None]] = []
        self.states: dict[
            str, tuple[str, tuple[int, str]]
        ] = {}  # placeholder → its next value, and the line for errors
        self.state_needs: dict[str, Requirement | None] = {}

    # -- lines ---------------------------------------------------------------------------------------------------

    def program(self, make: type[P]) -> P:
        readers: dict[str, Callable[[], None]] = {
            "program": self._program_line,
            "stage": self._stage_line,
            "stream": self._stream_line,
            **dict.fromkeys(PHASES, self._phase_line),
            "  return": self._return_line,
            "  grad": self._grad_line,
            "  state": self._state_line,
        }
        for number, line in enumerate(self.text.splitlines(), 1):
            self.open(number, line)
            if not self.tokens:
                continue
            start = "  " * line.startswith("  ") + line[: self.tokens[0].end].strip()
            read = readers.get(start, self._value_line if line.startswith("  ") else None)
            if read is None or line[0].isspace() != line.startswith("  "):
                raise self.error("a line starts with 'program', 'stage', 'stream', a phase, or two spaces and a value")
            if (start == "program") != (not self.level):
                raise self.error(
                    f"the first line, and no other, is the header, as in 'program explicit on dp=2'; levels are "
                    f"{', '.join(LEVELS)}"
                )
            read()
            self.close()
        return self._finish(make)

    def _finish(self, make: type[P]) -> P:
        if not self.level:
            raise TextError("an empty text is not a program; it starts with a header, as in 'program traced'")
        results = [*self.returns, *self.grads]
        for name, (after, where) in self.states.items():
            if after not in self.values:
                raise self.error(f"the state {name} is replaced by {after}, which is no value of the program", where)
            node = self.values[after]
            results.append((Result("state", name), node, self.state_needs.get(name, self._own_requirement(node))))
        output = self.graph.output(tuple(node for _, node, _ in results))
        uses = self._recorded_uses(need for _, _, need in results)
        set_record(output, Record(None, uses, results=tuple(result for result, _, _ in results)))
        return make(self.graph, self.level, self.mesh, stages=self.stages, streams=tuple(self.streams),
                    coordinates=self.coordinates, tree=self.tree, constants=self.constants)  # fmt: skip

    def _program_line(self) -> None:
        self.word("program")
        level = self.word()
        if level not in LEVELS:
            raise self.error(f"no level {level!r}; levels are {', '.join(LEVELS)}")
        self.level = level
        if self.peek("on"):
            self.mesh = self._mesh(None)
        if self.skip("at"):
            self.coordinates = self._pairs()

    def _stage_line(self) -> None:
        self.word("stage")
        name = self.word()
        if name in self.stages:
            raise self.error(f"the stage {name} is named twice")
        self.stages[name] = self._mesh(name)

    def _stream_line(self) -> None:
        self.word("stream")
        name = self.word()
        if name in self.streams:
            raise self.error(f"the stream {name} is named twice")
        self.streams.append(name)

    def _phase_line(self) -> None:
        self.phase = self.word()
        self.sign(":")

    def _mesh(self, name: str | None) -> Mesh:
        self.word("on")
        axes, ranks = self._pairs(), None
        if self.skip("ranks"):
            ranks = []
            while self.kind() == "number":
                ranks.append(self.integer())
        try:
            return Mesh(axes, ranks=ranks, name=name)
        except ValueError as error:
            raise self.error(str(error)) from None

    def _pairs(self) -> dict[str, int]:
        pairs: dict[str, int] = {}
        while self.kind() == "word" and self.look(1) == "=":
            axis = self.word()
            if axis in pairs:
                raise self.error(f"the axis {axis} is named twice")
            self.sign("=")
            pairs[axis] = self.integer()
        return pairs

    def _return_line(self) -> None:
        """Read the tree, which is Python: quoted keys, ``Class(field=value)``, tuples, lists, dicts. Bare names are
        values."""
        if self.tree:
            raise self.error("the program returns twice")
        self.word("return")
        self._begin(self.may_require)
        fragments, done = [""], self.tokens[0].end + 1
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "word" and token.text not in WORDS and self.look(1) not in ("=", "("):
                fragments[-1] += self.line[done : token.start]
                fragments.append("")
                self.returns.append((Result("return"), self.operand(), self.uses[-1]))
            else:
                self.at += 1
                fragments[-1] += self.line[done : token.end]
            done = self.tokens[self.at - 1].end
        self.tree = tuple(fragments)

    def _grad_line(self) -> None:
        self.word("grad")
        of = self.word()
        if of not in self.values or self.values[of].op != "placeholder":
            raise self.error(f"{of} is no placeholder of the program")
        if any(result.of == of for result, _, _ in self.grads):
            raise self.error(f"the gradient of {of} is given twice")
        self.sign("=")
        self._begin(self.may_require)
        self.grads.append((Result("grad", of), self.operand(), self.uses[-1]))

    def _state_line(self) -> None:
        """Read the required Layout of a next state. Such a line is written only where it differs from the value's
        Layout."""
        self.word("state")
        of = self.word()
        if of not in self.states:
            raise self.error(f"{of} is no state of the program")
        if of in self.state_needs:
            raise self.error(f"the next value of {of} is given twice")
        self.sign("=")
        self._begin(self.may_require)
        if self.operand().name != self.states[of][0]:
            raise self.error(f"the state {of} is replaced by {self.states[of][0]}, as its placeholder says")
        self.state_needs[of] = self.uses[-1]

    # -- values --------------------------------------------------------------------------------------------------

    def _value_line(self) -> None:
        name = self.word()
        if name in self.values:
            raise self.error(f"the value {name} is made twice")
        if name in RESERVED or "." in name or ":" in name:
            raise self.error(f"{name!r} cannot name a value; it has a meaning of its own")
        if not can_name(name):
            raise self.error(f"FX does not accept {name!r} as a name; a trailing underscore and a number make it one")
        self.sign(":")
        type = self.type()
        self.sign("=")
        op, target, args, kwargs, facts = self._definition(name, type)
        stream = self.word() if self.skip("on") else None
        node = self.graph.create_node(op, target, args, kwargs, name=name)
        set_record(node, Record(type, phase=self.phase, stream=stream, **facts))
        self.values[name] = node

    def _definition(
        self, name: str, type: ValueType
    ) -> tuple[str, Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        if self.look() in ROLES and (self.look(1) in ("(", "on") or self.at + 1 == len(self.tokens)):
            return "placeholder", name, (), {}, self._placeholder(name)
        if self.peek("constant"):
            self._constant(name, type)
            return "get_attr", name, (), {}, {}
        self._begin(self.may_require)
        if self.kind() == "word" and self.look(1) == "[":
            args: tuple[Any, ...] = self._element()
            return "call_function", operator.getitem, args, {}, {"uses": self._recorded_uses(self.uses)}
        started = self.look(1) not in ("(", "") and self.skip("start")
        target = self._target(self.word())
        transfer = target in transfers.BY_FUNCTION
        self.may_have_as = self.may_require and not transfer
        args, kwargs = self._arguments(transfer)
        if transfer:
            self._check_transfer(target, args, kwargs)
        elif wrong := misplaced(target, args, kwargs):
            raise self.error(wrong)
        uses = self._recorded_uses(self.uses) if self.may_have_as else ()
        return "call_function", target, args, kwargs, {"uses": uses, "started": started}

    def _placeholder(self, name: str) -> dict[str, Any]:
        """Read a role, and in parentheses the next value of a state, a tangent's position or the user's name."""
        facts: dict[str, Any] = {"role": self.word()}
        after = ""
        if self.skip("("):
            if self.kind() == "word":
                after = self.word()
            elif self.kind() == "number":
                facts["index"] = self.integer()
            if len(facts) > 1 or after:
                self.skip(",")
            if self.kind() == "string":
                facts["name"] = "" if (user_name := self.string()) == name else user_name  # as the printer writes it
            self.sign(")")
        if (facts["role"] == "state") != bool(after):
            raise self.error("a state names the value that replaces it, as in 'state(next)'; other placeholders do not")
        if (facts["role"] == "tangent") != ("index" in facts):
            raise self.error(
                "a tangent names the position of its value among those returned, as in 'tangent(0)'; other "
                "placeholders do not"
            )
        if after:
            self.states[name] = (after, (self.number, self.line))
        return facts

    def _constant(self, name: str, type: ValueType) -> None:
        self.word("constant")
        self.sign("(")
        content = _tuples(self.literal())
        self.sign(")")
        if not isinstance(type, TensorType):
            raise self.error("a constant is one tensor")
        tensor = None
        if not isinstance(content, str):
            try:
                tensor = torch.tensor(content, dtype=type.dtype)
                tensor = tensor if tensor.numel() else tensor.reshape(type.shape)
            except (TypeError, ValueError, RuntimeError) as error:
                raise self.error(f"these elements make no tensor: {error}") from None
            if tuple(tensor.shape) != type.shape:
                raise self.error(
                    f"these elements have the shape {list(tensor.shape)}, the type says {list(type.shape)}"
                )
        self.constants[name] = Constant(type.shape, type.dtype, content, tensor)

    def _element(self) -> tuple[fx.Node, int]:
        source = self.operand()
        types = record_of(source).type
        self.sign("[")
        index = self.integer()
        self.sign("]")
        if not isinstance(types, tuple) or not 0 <= index < len(types):
            count = f"has {len(types)} elements" if isinstance(types, tuple) else "is one tensor and has no elements"
            raise self.error(f"{source.name} {count}: there is no {source.name}[{index}]")
        return source, index

    def _target(self, name: str) -> Any:
        if name in transfers.TRANSFERS:
            return transfers.TRANSFERS[name].function
        space, _, rest = name.rpartition("::")
        packet, _, overload = rest.partition(".")
        try:
            op = getattr(getattr(getattr(torch.ops, space or "aten"), packet), overload or "default")
        except AttributeError:
            op = None
        if not isinstance(op, OpOverload):
            raise self.error(f"no op or transfer {name!r}; ops print as 'mm', 'add.Tensor' or 'library::op'")
        return op

    def _arguments(self, transfer: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}

        def read_argument() -> None:
            if self.kind() == "word" and self.look(1) == "=":
                key = self.word()
                if key in kwargs:
                    raise self.error(f"the argument {key} is given twice")
                self.sign("=")
                kwargs[key] = self.literal(bare=True) if transfer else self.argument()
            elif kwargs:
                raise self.error("arguments by position come before those by name")
            else:
                args.append(self.literal(bare=True) if transfer and args else self.argument())

        self.sequence("(", ")", read_argument)
        return tuple(args), kwargs

    def _check_transfer(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = function.__name__
        if function is transfers.recv and args and args[0] is None and self.level in ("local", "scheduled"):
            return  # the value to receive is on other ranks
        if not args or not isinstance(args[0], fx.Node):
            raise self.error(f"{name} takes a value first, as in {name}(x)")
        if not isinstance(record_of(args[0]).type, TensorType):
            raise self.error(f"{name} takes one tensor; {args[0]} has several")
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise self.error(f"{name}: {error}") from None

    # -- operands ------------------------------------------------------------------------------------------------

    def _begin(self, may_have_as: bool) -> None:
        self.uses, self.may_have_as = [], may_have_as

    def argument(self) -> Any:
        if self.peek("["):
            return self.sequence("[", "]", self.argument)
        if self.peek("("):
            return tuple(self.sequence("(", ")", self.argument))
        if self.kind() == "word" and self.look() not in WORDS and self.look(1) != "(":
            return self.operand()
        return self.literal()

    def operand(self) -> fx.Node:
        name = self.word()
        if name not in self.values:
            raise self.error(f"{name} is read before it is made")
        node = self.values[name]
        need = self._own_requirement(node)
        if self.skip("as"):
            need = self._requirement(node)
        self.uses.append(need)
        return node

    def _requirement(self, node: fx.Node) -> Requirement:
        type = record_of(node).type
        if not self.may_have_as or (self.level == "traced" and self.kind() != "word"):
            raise self.error(
                "only ops and results of placed and explicit programs require a Layout with 'as'; transfers accept "
                "any Layout"
            )
        if not isinstance(type, TensorType):
            raise self.error(f"{node.name} has several tensors; require a Layout of its elements")
        if self.level == "traced":
            dtype = self.dtype()
            if self.peek("["):
                raise self.error(
                    f"a use in a traced program requires a dtype alone, as in '{node.name} as {DTYPE_NAMES[dtype]}': "
                    f"place decides its Layout"
                )
            return Requirement(None, dtype)
        dtype = self.dtype() if self.kind() == "word" else type.dtype
        shape, layout = self.placed()
        if shape != type.shape:
            raise self.error(f"{node.name} has the shape {list(type.shape)}, required is {list(shape)}")
        assert layout is not None
        return Requirement(layout, dtype)

    def _recorded_uses(self, uses: Iterable[Requirement | None]) -> tuple[Requirement | None, ...]:
        """Return the requirements of a record; none at the level ``traced`` if no operand has one."""
        requirements = tuple(uses)
        return requirements if self.has_uses or any(requirements) else ()

    def _own_requirement(self, node: fx.Node) -> Requirement | None:
        type = record_of(node).type
        if not self.has_uses or not isinstance(type, TensorType) or type.layout is None:
            return None
        return Requirement(type.layout, type.dtype)


def _tuples(value: object) -> object:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
