"""Parsing: a dump back into a program, by recursive descent over one line at a time. Grammar: ``GRAMMAR.md``."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar import transfers
from autopar.errors import TextError
from autopar.layout import UNDECIDED, DistAttr, Layout
from autopar.mesh import Mesh
from autopar.program import LEVELS, Constant, Program, record_of, set_record
from autopar.record import DTYPES, PHASES, ROLES, Record, Requirement, Result, TensorType, ValueType
from autopar.text.printer import LITERALS
from autopar.torch_private import OpOverload

WORDS: dict[str, Any] = {text: value for value, text in LITERALS.items()} | {"inf": math.inf, "nan": math.nan}
RESERVED = frozenset(WORDS) | {"device", "constant", "start", "as", "on", "return", "grad", *PHASES}

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf\b))
    |(?P<word>[A-Za-z_][\w]*(?:::\w+)?(?:\.[A-Za-z_]\w*)*)
    |(?P<sign>[\[\](){},:=/+@?]))""",
    re.VERBOSE,
)


def parse_program(text: str) -> Program:
    return _Parser(text).program()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.number = 0
        self.line = ""
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        self.level = ""
        self.mesh: Mesh | None = None
        self.stages: dict[str, Mesh] = {}
        self.streams: list[str] = []
        self.coordinates: dict[str, int] | None = None
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self.constants: dict[str, Constant] = {}
        self.states: dict[str, str] = {}  # placeholder → name of its next value
        self.phase = PHASES[0]
        self.tree: tuple[str, ...] = ()
        self.results: list[tuple[Result, fx.Node, Requirement | None]] = []

    # -- lines ---------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        readers: list[tuple[str, Callable[[], None]]] = [
            ("program ", self._program_line),
            ("stage ", self._stage_line),
            ("stream ", self._stream_line),
            ("  return ", self._return_line),
            ("  grad ", self._grad_line),
            ("  state ", self._grad_line),
            ("  ", self._value_line),
        ]
        for self.number, line in enumerate(self.text.splitlines(), 1):
            self.line = line
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if line.rstrip() in {f"{phase}:" for phase in PHASES}:
                self.phase = line.rstrip()[:-1]
                continue
            start, read = next((row for row in readers if line.startswith(row[0])), ("", None))
            if read is None:
                raise self.error("a line starts with 'program', 'stage', 'stream', a phase, or two spaces and a value")
            if not self.level and start != "program ":
                raise self.error(f"the first line is the header, as in 'program explicit on dp=2'; levels are {', '.join(LEVELS)}")
            self.tokens, self.at = self._tokenize(line), 0
            read()
            if self.at < len(self.tokens):
                raise self.error(f"{self.tokens[self.at][1]!r} is left over")
        return self._finish()

    def _finish(self) -> Program:
        if not self.level:
            raise TextError("an empty text is not a program; it starts with a header, as in 'program traced'")
        order = ("return", "grad", "state")
        for name, after in self.states.items():
            if Result("state", name) not in [r for r, _, _ in self.results]:
                if after not in self.values:
                    raise TextError(f"the state {name} is replaced by {after}, which is no value of the program")
                node = self.values[after]
                self.results.append((Result("state", name), node, self._own(node)))
        self.results.sort(key=lambda row: order.index(row[0].kind))
        output = self.graph.output(tuple(node for _, node, _ in self.results))
        uses = tuple(need for _, _, need in self.results) if self.has_uses else ()
        set_record(output, Record(None, uses, "forward", results=tuple(result for result, _, _ in self.results)))
        return Program(self.graph, self.level, self.mesh, stages=self.stages, streams=tuple(self.streams),
                       coordinates=self.coordinates, tree=self.tree, constants=self.constants)  # fmt: skip

    @property
    def has_uses(self) -> bool:
        return self.level in ("placed", "explicit")

    def _program_line(self) -> None:
        self.word("program")
        self.level = self.word()
        if self.level not in LEVELS:
            raise self.error(f"no level {self.level!r}; levels are {', '.join(LEVELS)}")
        if self.peek("on"):
            self.mesh = self._mesh(None)
        if self.peek("at"):
            self.word("at")
            self.coordinates = self._pairs()

    def _stage_line(self) -> None:
        self.word("stage")
        name = self.word()
        self.stages[name] = self._mesh(name)

    def _stream_line(self) -> None:
        self.word("stream")
        self.streams.append(self.word())

    def _mesh(self, name: str | None) -> Mesh:
        self.word("on")
        axes, ranks = self._pairs(), None
        if self.peek("ranks"):
            self.word("ranks")
            ranks = []
            while self.kind() == "number":
                ranks.append(int(self.take()))
        try:
            return Mesh(axes, ranks=ranks, name=name)
        except ValueError as error:
            raise self.error(str(error)) from None

    def _pairs(self) -> dict[str, int]:
        pairs: dict[str, int] = {}
        while self.kind() == "word" and self.look(1) == "=":
            axis = self.word()
            self.sign("=")
            pairs[axis] = int(self.take("number"))
        return pairs

    def _value_line(self) -> None:
        name = self.word()
        if name in self.values:
            raise self.error(f"the value {name} is made twice")
        if name in RESERVED or "." in name or ":" in name:
            raise self.error(f"{name!r} cannot name a value; it has a meaning of its own")
        self.sign(":")
        type = self.type()
        self.sign("=")
        op, target, args, kwargs, facts = self._made(name, type)
        stream = None
        if self.peek("on"):
            self.word("on")
            stream = self.word()
        node = self.graph.create_node(op, target, args, kwargs, name=name)
        if node.name != name:
            raise self.error(f"FX does not accept {name!r} as a name; a trailing underscore and a number make it one")
        set_record(node, Record(type, phase=self.phase, stream=stream, **facts))
        self.values[name] = node

    def _made(self, name: str, type: ValueType) -> tuple[str, Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        if self.kind() == "word" and self.tokens[self.at][1] in ROLES and self.look(1) in ("", "(", "on"):
            return ("placeholder", name, (), {}, self._placeholder(name))
        if self.peek("constant"):
            return ("get_attr", name, (), {}, self._constant(name, type))
        self.uses: list[Requirement | None] = []
        if self.kind() == "word" and self.look(1) == "[":
            source = self.operand()
            self.sign("[")
            index = int(self.take("number"))
            self.sign("]")
            return ("call_function", operator.getitem, (source, index), {}, {"uses": self._kept(operator.getitem)})
        started = bool(self.peek("start")) and self.look(1) not in ("(", "")
        if started:
            self.word("start")
        target = self._target(self.word())
        args, kwargs = self._arguments(target in transfers.BY_FUNCTION)
        return ("call_function", target, args, kwargs, {"uses": self._kept(target), "started": started})

    def _kept(self, target: Any) -> tuple[Requirement | None, ...]:
        return () if target in transfers.BY_FUNCTION or not self.has_uses else tuple(self.uses)

    def _placeholder(self, name: str) -> dict[str, Any]:
        role = self.word()
        facts: dict[str, Any] = {"role": role}
        if self.peek("("):
            self._about(name, facts)
        if (role == "state") != (name in self.states):
            raise self.error("a state names the value that replaces it, as in 'state(next)'; other placeholders do not")
        if (role == "tangent") != ("index" in facts):
            raise self.error("a tangent names the position of its value among those returned, as in 'tangent(0)'; other placeholders do not")
        return facts

    def _about(self, name: str, facts: dict[str, Any]) -> None:
        """What stands in parentheses behind a role: the next value of a state, a tangent's position, the user's name."""
        self.sign("(")
        if self.kind() == "word":
            self.states[name] = self.word()
        elif self.kind() == "number":
            facts["index"] = int(self.take())
        if self.peek(","):
            self.sign(",")
        if self.kind() == "string":
            facts["name"] = ast.literal_eval(self.take())
        self.sign(")")

    def _constant(self, name: str, type: ValueType) -> dict[str, Any]:
        self.word("constant")
        self.sign("(")
        content = self.literal()
        self.sign(")")
        assert isinstance(type, TensorType)
        tensor = None
        if not isinstance(content, str):
            content = _tuples(content)
            tensor = torch.tensor(content, dtype=type.dtype).reshape(type.shape)
        self.constants[name] = Constant(type.shape, type.dtype, content, tensor)
        return {}

    def _target(self, name: str) -> Any:
        if name in transfers.TRANSFERS:
            return transfers.TRANSFERS[name].function
        space, _, rest = name.rpartition("::")
        packet, _, overload = rest.partition(".")
        try:
            found = getattr(getattr(getattr(torch.ops, space or "aten"), packet), overload or "default")
        except AttributeError:
            found = None
        if not isinstance(found, OpOverload):
            raise self.error(f"no op or transfer {name!r}; ops print as 'mm', 'add.Tensor' or 'library::op'")
        return found

    def _arguments(self, transfer: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self.sign("(")
        while not self.peek(")"):
            if self.kind() == "word" and self.look(1) == "=":
                key = self.word()
                self.sign("=")
                kwargs[key] = self.literal(bare=True) if transfer else self.argument()
            else:
                args.append(self.literal(bare=True) if transfer and args else self.argument())
            if not self.peek(")"):
                self.sign(",")
        self.sign(")")
        return tuple(args), kwargs

    def _return_line(self) -> None:
        """The tree is Python: quoted keys, ``Class(field=value)``, tuples, lists, dicts; values are its bare names."""
        body = self.line[len("  return ") :]
        fragments = [""]
        self.at = 1
        position = 0
        while self.at < len(self.tokens):
            kind, token = self.tokens[self.at]
            start = body.index(token, position)
            leaf = kind == "word" and token not in WORDS and self.look(1) not in ("=", "(")
            if leaf:
                fragments[-1] += body[position:start]
                self.uses = []
                node = self.operand()
                self.results.append((Result("return"), node, self.uses[0]))
                fragments.append("")
                position = start + len(token)
                if self.uses[0] != self._own(node):
                    position = body.index("as ", position) + 3
                    for _, part in self.tokens[self.requirement_from : self.at]:
                        position = body.index(part, position) + len(part)
            else:
                self.at += 1
                fragments[-1] += body[position : start + len(token)]
                position = start + len(token)
        self.tree = tuple(fragments)

    def _grad_line(self) -> None:
        kind, of = self.word(), self.word()
        if of not in self.values:
            raise self.error(f"{of} is no placeholder of the program")
        self.sign("=")
        self.uses = []
        node = self.operand()
        self.results.append((Result(kind, of), node, self.uses[0]))

    # -- arguments -----------------------------------------------------------------------------------------------

    def argument(self) -> Any:
        if self.peek("["):
            return self._sequence("[", "]", self.argument)
        if self.peek("("):
            return tuple(self._sequence("(", ")", self.argument))
        if self.kind() == "word" and self.tokens[self.at][1] not in WORDS and self.look(1) != "(":
            return self.operand()
        return self.literal()

    def operand(self) -> fx.Node:
        name = self.word()
        if name not in self.values:
            raise self.error(f"{name} is read before it is made")
        node = self.values[name]
        need = self._own(node)
        if self.peek("as"):
            self.word("as")
            self.requirement_from = self.at
            own = record_of(node).type
            assert isinstance(own, TensorType)
            dtype = DTYPES[self.word()] if self.kind() == "word" else own.dtype
            shape, layout = self._placed(True)
            if shape != own.shape or layout is None:
                raise self.error(f"{name} has the shape {list(own.shape)}, required is {list(shape)}")
            need = Requirement(layout, dtype)
        self.uses.append(need)
        return node

    def _own(self, node: fx.Node) -> Requirement | None:
        own = record_of(node).type
        if not self.has_uses or not isinstance(own, TensorType) or own.layout is None:
            return None
        return Requirement(own.layout, own.dtype)

    def literal(self, bare: bool = False) -> Any:
        if self.peek("["):
            return self._sequence("[", "]", lambda: self.literal(bare))
        if self.peek("("):
            return tuple(self._sequence("(", ")", lambda: self.literal(bare)))
        kind = self.kind()
        if kind == "string":
            return ast.literal_eval(self.take())
        if kind == "number":
            token = self.take()
            return -math.inf if token == "-inf" else float(token) if re.search(r"[.e]", token) else int(token)
        if kind == "word" and self.tokens[self.at][1] in WORDS:
            return WORDS[self.word()]
        if self.peek("device"):
            self.word()
            self.sign("(")
            name = ast.literal_eval(self.take("string"))
            self.sign(")")
            return torch.device(name)
        if kind == "word" and bare:
            return self.word()
        raise self.error(f"expected a scalar, found {self.look(0)!r}")

    def _sequence(self, left: str, right: str, one: Callable[[], Any]) -> list[Any]:
        self.sign(left)
        found = []
        while not self.peek(right):
            found.append(one())
            if not self.peek(right):
                self.sign(",")
        self.sign(right)
        return found

    # -- types ---------------------------------------------------------------------------------------------------

    def type(self) -> ValueType:
        if self.peek("None"):
            self.word()
            return None
        if self.peek("("):
            types = self._sequence("(", ")", self.type)
            return tuple(types)
        name = self.word()
        if name not in DTYPES:
            raise self.error(f"no dtype {name!r}; dtypes are {', '.join(DTYPES)}")
        shape, layout = self._placed(self.has_uses)
        return TensorType(shape, DTYPES[name], layout)

    def _placed(self, always: bool) -> tuple[tuple[int, ...], Layout | None]:
        """The dims in brackets, what is pending, and the stage; a Layout where the level or the text has one."""
        self.sign("[")
        rows = []
        while not self.peek("]"):
            if self.peek("("):
                self.sign("(")
                parts = []
                while not self.peek(")"):
                    parts.append(self._part())
                self.sign(")")
                rows.append((math.prod(size for size, _ in parts), tuple(parts)))
            else:
                size, axes = self._part()
                rows.append((size, ((None, axes),)))
        self.sign("]")
        pending = {}
        while self.peek("+"):
            self.sign("+")
            axis, kind = self.word(), "sum"
            if self.peek(":"):
                self.sign(":")
                axis, kind = self.word(), axis
            pending[axis] = kind
        mesh = self.mesh
        if self.peek("@"):
            self.sign("@")
            stage = self.word()
            if stage not in self.stages:
                raise self.error(f"there is no stage {stage!r}; stages are {', '.join(self.stages) or 'none'}")
            mesh = self.stages[stage]
        shape = tuple(size for size, _ in rows)
        attr = DistAttr(tuple(dim for _, dim in rows), tuple(sorted(pending.items())))
        if not always and (attr.is_replicated or self.level in ("local", "scheduled")):
            if not attr.is_replicated:
                raise self.error(f"a {self.level} program has the sizes of one rank, without '/axis' or '+axis'")
            return shape, None
        return shape, self._layout(attr, shape, mesh)

    def _layout(self, attr: DistAttr, shape: tuple[int, ...], mesh: Mesh | None) -> Layout:
        if mesh is None:
            raise self.error("a value is placed, but the header names no mesh, as in 'on dp=2 tp=2'")
        axes = attr.axes
        try:
            for axis in axes:
                if axis != UNDECIDED:
                    mesh.check_axis(axis)
        except ValueError as error:
            raise self.error(str(error)) from None
        return Layout(mesh, attr if UNDECIDED in axes else attr.normalize(shape, mesh))

    def _part(self) -> tuple[int, tuple[str, ...]]:
        size = int(self.take("number"))
        axes = []
        while self.peek("/"):
            self.sign("/")
            axes.append(self.take() if self.peek(UNDECIDED) else self.word())
        return size, tuple(axes)

    # -- tokens --------------------------------------------------------------------------------------------------

    def _tokenize(self, line: str) -> list[tuple[str, str]]:
        tokens = []
        position = 0
        while position < len(line):
            if not line[position:].strip() or line[position:].lstrip().startswith("#"):
                break
            match = _TOKEN.match(line, position)
            if match is None:
                raise self.error(f"{line[position:].strip()[:12]!r} is not part of the grammar")
            tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
            position = match.end()
        return tokens

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def look(self, ahead: int) -> str:
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else ""

    def peek(self, token: str) -> bool:
        return self.look(0) == token and self.kind() != "string"

    def take(self, kind: str = "") -> str:
        if self.at >= len(self.tokens) or (kind and self.kind() != kind):
            raise self.error(f"expected a {kind or 'token'}, found {self.look(0)!r}" if self.look(0) else f"the line ends where a {kind or 'token'} is expected")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def word(self, expected: str = "") -> str:
        token = self.take("word")
        if expected and token != expected:
            raise self.error(f"expected {expected!r}, found {token!r}")
        return token

    def sign(self, expected: str) -> None:
        if not self.peek(expected):
            raise self.error(f"expected {expected!r}, found {self.look(0)!r}" if self.look(0) else f"the line ends where {expected!r} is expected")
        self.at += 1

    def error(self, what: str) -> TextError:
        return TextError(f"line {self.number}: {what}\n    {self.line.strip()}")


def _tuples(value: object) -> object:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
