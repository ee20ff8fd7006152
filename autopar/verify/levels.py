"""Verify a program against the promises of its level. It runs after every pass, so that the error names the pass at
fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from autopar.errors import RuleError, VerifyError
from autopar.ir import transfers
from autopar.ir.edit import HALF_DONE, is_half_done
from autopar.ir.layout import UNDECIDED, Layout
from autopar.ir.nodes import element_type, has_record, is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import PHASES, ROLES, Record, Requirement, TensorType
from autopar.ir.text.printer import print_node, print_requirement, print_type
from autopar.rules.binding import bind_node

ORDER = ("return", "grad", "state")  # the order of results
PIECES: dict[Any, tuple[str, ...]] = {  # transfer → its arguments with piece sizes, at the level local
    transfers.all_gather: ("sizes",),
    transfers.slice: ("sizes",),
    transfers.reduce_scatter: ("sizes",),
    transfers.all_to_all: ("sizes", "new_sizes"),
    transfers.pend: ("sizes",),
}
EXCHANGES = (transfers.redistribute, transfers.send, transfers.recv)


def verify(program: Program, made_by: str = "") -> None:
    """Raise ``VerifyError`` for the first node that breaks a promise of the program's level. Linear in the graph.

    Args:
        made_by: the pass that made the program, named in the error.
    """
    _Verifier(program, made_by).run()


Program.verifier = verify


class _Verifier:
    def __init__(self, program: Program, made_by: str) -> None:
        self.program = program
        self.made_by = made_by
        self.unwaited: dict[fx.Node, None] = {}

    def run(self) -> None:
        checks: dict[str, tuple[Callable[[fx.Node, Record], None], ...]] = {
            "traced": (self.check_dtypes, self.check_untransferred, self.check_unstreamed),
            "placed": (self.check_placed, self.check_rule, self.check_untransferred, self.check_unstreamed),
            "explicit": (self.check_placed, self.check_rule, self.check_unstreamed),
            "local": (self.check_local, self.check_unstreamed),
            "scheduled": (self.check_local, self.check_stream),
        }
        seen: dict[fx.Node, None] = {}
        names: set[str] = set()
        self.check_header()
        for node in self.program.nodes:
            if not has_record(node):
                raise self.error(node, "every node has a record; this one was made without program.edit()")
            for operand in node.all_input_nodes:
                if operand not in seen:
                    raise self.error(node, f"{operand.name} is read before it is made")
            if node.name in names:
                raise self.error(node, f"the name {node.name} is given twice")
            seen[node] = None
            names.add(node.name)
            record = record_of(node)
            self.check_record(node, record)
            for check in checks[self.program.level]:
                check(node, record)
        if self.unwaited:
            node = next(iter(self.unwaited))
            raise self.error(node, f"{node.name} is started and never waited for: insert wait({node.name})")

    # -- every level ---------------------------------------------------------------------------------------------

    def check_header(self) -> None:
        program, level = self.program, self.program.level
        if is_half_done(program):
            raise VerifyError(f"{self.head()}  {HALF_DONE}")
        if level != "traced" and program.mesh is None:
            raise VerifyError(f"{self.head()}  a {level} program needs a mesh; the header names none")
        if (level in ("local", "scheduled")) != (program.coordinates is not None):
            raise VerifyError(
                f"{self.head()}  local and scheduled programs, and no others, have the coordinates of one rank"
            )
        if program.coordinates is not None and program.mesh is not None:
            if program.coordinates.keys() != program.mesh.sizes.keys():
                raise VerifyError(
                    f"{self.head()}  the coordinates need one index for each axis of the mesh ({program.mesh})"
                )
            try:
                program.mesh.rank(program.coordinates)
            except ValueError as error:
                raise VerifyError(f"{self.head()}  {error}") from None

    def check_phase(self, node: fx.Node, record: Record) -> None:
        """Check that no node reads a value of a later phase."""
        for value in node.all_input_nodes:
            about = record_of(value)
            phase = "backward" if about.role == "tangent" else about.phase
            if phase in PHASES and PHASES.index(phase) > PHASES.index(record.phase):
                raise self.error(
                    node,
                    f"{node.name} is part of the {record.phase} and reads {value.name}, which is part of the {phase}",
                    value,
                )

    def check_record(self, node: fx.Node, record: Record) -> None:
        if record.phase not in PHASES:
            raise self.error(node, f"no phase {record.phase!r}; phases are {', '.join(PHASES)}")
        if node.op == "placeholder" and record.role not in ROLES:
            raise self.error(node, f"no role {record.role!r}; roles are {', '.join(ROLES)}")
        if node.op == "output":
            self.check_results(node, record)
        elif not isinstance(record.type, (TensorType, tuple)):
            raise self.error(node, "every value has a type")
        if node.op == "call_function":
            self.check_phase(node, record)
        if is_getitem(node):
            source: Any
            index: Any
            source, index = node.args
            types = record_of(source).type
            if not isinstance(types, tuple) or not 0 <= index < len(types):
                raise self.error(node, f"{source} has no element {index}", source)
            if record.type != element_type(node):
                raise self.error(node, f"element {index} is {print_type(element_type(node))}", source)

    def check_results(self, node: fx.Node, record: Record) -> None:
        """Check that returned values fit the tree, and that gradients and states belong to placeholders that may have
        them."""
        values, results = operands(node), record.results
        if len(results) != len(values):
            raise self.error(node, f"{len(values)} results, but the record describes {len(results)} of them")
        returned = sum(result.kind == "return" for result in results)
        if len(self.program.tree) != (returned + 1 if returned or self.program.tree else 0):
            raise self.error(
                node,
                f"{returned} values are returned, but the tree has places for {max(len(self.program.tree) - 1, 0)}",
            )
        homes = {p.name: p for p in self.program.placeholders}
        states = [name for name, p in homes.items() if record_of(p).role == "state"]
        if [r.of for r in results if r.kind == "state"] != states:
            raise self.error(
                node,
                f"each state is replaced once, in the order of the placeholders: "
                f"{', '.join(states) or 'there are none'}",
            )
        if list(results) != sorted(results, key=lambda r: ORDER.index(r.kind)):
            raise self.error(node, "results are in the order: returned values, gradients, states")
        for index, (value, result) in enumerate(zip(values, results, strict=True)):
            if result.kind == "return":
                continue
            if result.of not in homes:
                raise self.error(
                    node, f"there is no placeholder {result.of} to have {value} as its {result.kind}", value
                )
            home_type, value_type = record_of(homes[result.of]).type, record_of(value).type
            if (
                not isinstance(home_type, TensorType)
                or not isinstance(value_type, TensorType)
                or home_type.shape != value_type.shape
            ):
                raise self.error(
                    node, f"{value} is the {result.kind} of {result.of} and has another shape", homes[result.of], value
                )
            need = record.uses[index] if index < len(record.uses) else None
            if (
                result.kind == "state"
                and home_type.layout is not None
                and need is not None
                and need.layout is not None
                and need != Requirement(home_type.layout, home_type.dtype)
            ):
                raise self.error(
                    node,
                    f"{result.of} and its next value must have the same Layout: require {value} as "
                    f"{print_type(home_type)}",
                    homes[result.of],
                    value,
                )

    def check_dtypes(self, node: fx.Node, record: Record) -> None:
        """Check that a traced program requires dtypes only."""
        if record.uses and len(record.uses) != len(operands(node)):
            raise self.error(
                node,
                f"{len(operands(node))} operands, but {len(record.uses)} requirements: every use has one, or none has",
            )
        if any(need is not None and need.layout is not None for need in record.uses):
            raise self.error(node, "a use in a traced program requires a dtype alone; place decides its Layout")

    def check_untransferred(self, node: fx.Node, record: Record) -> None:
        if node.target in transfers.BY_FUNCTION:
            raise self.error(node, f"a {self.program.level} program has no transfers; reshard inserts them")

    def check_unstreamed(self, node: fx.Node, record: Record) -> None:
        if record.started or record.stream is not None or node.target is transfers.wait:
            raise self.error(
                node, f"a {self.program.level} program has no streams; only a scheduled one starts and waits"
            )

    # -- placed and explicit -------------------------------------------------------------------------------------

    def check_placed(self, node: fx.Node, record: Record) -> None:
        for type in record.type if isinstance(record.type, tuple) else (record.type,):
            if type is not None:
                if type.layout is None:
                    raise self.error(node, f"at the level {self.program.level} every value has a Layout")
                self.check_layout(node, type, type.layout)
        if node.op not in ("call_function", "output") or node.target in transfers.BY_FUNCTION:
            return
        values = operands(node)
        if len(record.uses) != len(values):
            raise self.error(node, f"{len(values)} operands, but {len(record.uses)} requirements: every use has one")
        for value, need in zip(values, record.uses, strict=True):
            read = record_of(value).type
            if not isinstance(read, TensorType):
                continue
            if need is None:
                raise self.error(node, f"the use of {value.name} has no requirement", value)
            if need.layout is None:
                raise self.error(
                    node, f"the use of {value.name} requires a dtype alone; place gives it a Layout", value
                )
            self.check_layout(node, read, need.layout)
            if self.program.level == "explicit" and (need.layout, need.dtype) != (read.layout, read.dtype):
                user = "the output" if node.op == "output" else node.name
                wanted = f"{user} needs {value.name} as {print_requirement(need, read)}, but it is {print_type(read)}"
                raise self.error(node, f"{wanted}: insert the transfers between them", value)

    def check_layout(self, node: fx.Node, type: TensorType, layout: Layout) -> None:
        attr, mesh = layout.attr, layout.mesh
        if len(attr.dims) != len(type.shape):
            raise self.error(node, f"the Layout has {len(attr.dims)} dims, the value {len(type.shape)}")
        axes = attr.axes
        if UNDECIDED in axes:
            raise self.error(node, "a dim is left undecided ('?'): place decides it")
        if mesh != self.program.mesh and self.program.stages.get(mesh.name or "") != mesh:
            raise self.error(node, f"the mesh ({mesh!r}) is neither the program's nor one of its stages")
        for axis in axes:
            try:
                mesh.check_axis(axis)
            except ValueError as error:
                raise self.error(node, str(error)) from None
        if len(set(axes)) < len(axes):
            twice = next(axis for axis in axes if axes.count(axis) > 1)
            raise self.error(
                node, f"the axis {twice} is used twice on one value; each axis splits it, or is pending, once"
            )
        if len({kind for _, kind in attr.pending}) > 1:
            kinds = " and ".join(f"{kind} over {axis}" for axis, kind in attr.pending)
            raise self.error(
                node, f"pending {kinds} at once: the order of the reductions would matter; reduce one first"
            )
        if attr.normalize(type.shape, mesh) != attr:
            raise self.error(node, "the Layout is not in its normal form; make it with DistAttr.normalize")

    def check_rule(self, node: fx.Node, record: Record) -> None:
        if node.op != "call_function" or is_getitem(node):
            return
        values = operands(node)
        if node.target in transfers.BY_FUNCTION:
            self.check_transfer(node, values[0], record)
            return
        try:
            bound = bind_node(node)
        except RuleError as error:
            raise self.error(node, str(error), *values) from None
        results = record.type if isinstance(record.type, tuple) else (record.type,)
        needs = [need.placed.attr for need in record.uses if need is not None]
        gives = [None if r is None else r.attr for r in results]
        meshes = {need.placed.mesh for need in record.uses if need} | {r.layout.mesh for r in results if r and r.layout}
        if len(meshes) > 1:
            raise self.error(
                node,
                "operands and results are on different meshes; an op runs on one: insert a send and a recv",
                *values,
            )
        if meshes and (why := bound.check(meshes.pop(), needs, gives, [v.name for v in values])):
            raise self.error(node, why, *values)

    def check_transfer(self, node: fx.Node, value: fx.Node, record: Record) -> None:
        row = transfers.BY_FUNCTION[node.target]
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        source = record_of(value).type
        if not isinstance(source, TensorType):
            raise self.error(node, f"{row.name} takes one tensor and makes one", value)
        try:
            want = row.infer(source, arguments, self.program.meshes)
        except ValueError as error:
            raise self.error(node, str(error), value) from None
        if want != record.type:
            raise self.error(node, f"{row.name} makes it {print_type(want)}", value)
        self.check_channel(node, value, arguments)

    def check_channel(self, node: fx.Node, value: fx.Node, arguments: Mapping[str, Any]) -> None:
        """Check that a sent value is only received, and by the stage it was sent to."""
        if node.target is transfers.send:
            for user in node.users:
                if user.target is not transfers.recv:
                    raise self.error(
                        user,
                        f"{node} is on its way to {arguments['stage']}: read a recv({node}, {arguments['stage']})",
                        node,
                    )
        elif node.target is transfers.recv:
            sent = value.target is transfers.send
            stage = transfers.arguments(transfers.send, value.args, value.kwargs)["stage"] if sent else None
            if stage != arguments["stage"]:
                raise self.error(
                    node,
                    f"{value} was not sent to {arguments['stage']}: receive a send({value}, {arguments['stage']})",
                    value,
                )

    # -- local and scheduled -------------------------------------------------------------------------------------

    def check_local(self, node: fx.Node, record: Record) -> None:
        types = record.type if isinstance(record.type, tuple) else (record.type,)
        if any(type is not None and type.layout is not None for type in types) or record.uses:
            raise self.error(node, f"a {self.program.level} program has the sizes of one rank and no Layouts")
        if node.target not in transfers.BY_FUNCTION:
            return
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        if not operands(node) and not (node.target is transfers.recv and node.args[0] is None):
            raise self.error(node, f"{transfers.BY_FUNCTION[node.target].name} takes one tensor")
        if node.target in EXCHANGES:
            self.check_exchange(node, record, arguments)
            return
        at: Mapping[str, int] = {}
        if "axis" in arguments:
            try:
                mesh = self.program.meshes[arguments.get("stage")]
                count = mesh.count(mesh.check_axis(axis) for axis in transfers.axes_of(arguments["axis"]))
                at = self.program.coordinates_on(arguments.get("stage"))
            except KeyError:
                raise self.error(node, f"there is no stage {arguments['stage']}") from None
            except ValueError as error:
                raise self.error(node, str(error)) from None
            for key in ("sizes", "new_sizes"):
                if key in arguments and len(arguments[key]) != count:
                    raise self.error(
                        node, f"{key} lists {len(arguments[key])} pieces, the axis {arguments['axis']} has {count}"
                    )
        self.check_pieces(node, operands(node)[0], record, arguments, at)

    def check_pieces(
        self, node: fx.Node, value: fx.Node, record: Record, arguments: Mapping[str, Any], at: Mapping[str, int]
    ) -> None:
        """Check that the explicit piece sizes agree with the local shapes of operand and result."""
        source = record_of(value).type
        if not isinstance(source, TensorType) or not isinstance(record.type, TensorType):
            raise self.error(node, f"{transfers.BY_FUNCTION[node.target].name} takes one tensor and makes one", value)
        want = source.shape
        if node.target is not transfers.pend or arguments.get("dim") is not None:
            for key in PIECES.get(node.target, ()):
                if key not in arguments:
                    raise self.error(
                        node,
                        f"at the level {self.program.level} it needs an argument {key} with the sizes of the pieces",
                        value,
                    )
            if node.target in PIECES:
                parts = [n for dim in arguments.get("parts") or ((n,) for n in source.shape) for n in dim]
                for place, size in _implied_sizes(node.target, arguments, at):
                    if not 0 <= place < len(parts):
                        raise self.error(node, f"there is no dim {place} in a value of {len(parts)}", value)
                    if parts[place] != size:
                        raise self.error(
                            node,
                            f"its piece sizes need an operand with {size} in dim {place}, but {value} has "
                            f"{parts[place]}",
                            value,
                        )
                want = transfers.local_shape(node.target, source.shape, arguments, at)
        if want != record.type.shape:
            raise self.error(node, f"its result is {list(want)}", value)

    def check_exchange(self, node: fx.Node, record: Record, arguments: Mapping[str, Any]) -> None:
        """Check that the Layouts at both ends agree with this rank's operand and result."""
        name, values, rank = transfers.BY_FUNCTION[node.target].name, operands(node), self.program.rank
        for key in ("splits", "source", "shape", *(("axis",) if node.target is transfers.redistribute else ("home",))):
            if key not in arguments:
                raise self.error(
                    node,
                    f"at the level {self.program.level} it needs an argument {key}, which describes the ends of the "
                    f"exchange",
                    *values,
                )
        try:
            ends = transfers.Ends.of(arguments, self.program.meshes)
        except (KeyError, ValueError) as error:
            raise self.error(node, f"the ends of the exchange are wrong: {error}", *values) from None
        operand_type = None if not values else record_of(values[0]).type
        on_source, on_target = rank in ends.source.mesh, rank in ends.target.mesh
        if on_source != bool(values) or (
            not on_target if node.target is not transfers.send else on_target or not on_source
        ):
            raise self.error(node, f"rank {rank} is not on the mesh that {name} names", *values)
        for type, layout, verb in (
            (operand_type, ends.source, "takes"),
            (record.type, ends.source if node.target is transfers.send else ends.target, "makes"),
        ):
            if type is None:
                continue
            want = layout.attr.local_shape(ends.shape, layout.mesh, layout.mesh.coordinates(rank))
            if not isinstance(type, TensorType) or type.shape != want:
                raise self.error(
                    node, f"rank {rank} {verb} a piece of {list(want)} there, not {print_type(type)}", *values
                )

    def check_stream(self, node: fx.Node, record: Record) -> None:
        if record.stream is not None and record.stream not in self.program.streams:
            raise self.error(
                node, f"no stream {record.stream!r}; streams are {', '.join(self.program.streams) or 'none'}"
            )
        if record.started:
            row = transfers.BY_FUNCTION.get(node.target)
            if row is None or not row.collective:
                raise self.error(node, "only a collective can be started and waited for")
            self.unwaited[node] = None
        for value in operands(node):
            if record_of(value).started != (node.target is transfers.wait):
                if node.target is transfers.wait:
                    raise self.error(node, f"{value.name} is not started: read it without waiting", value)
                raise self.error(node, f"{value.name} is only started here: read wait({value.name})", value)
            self.unwaited.pop(value, None)

    # -- errors --------------------------------------------------------------------------------------------------

    def head(self, name: str = "") -> str:
        """Return the first line of an error: ``reshard left relu inconsistent``, or without the pass if it is not
        known."""
        if self.made_by:
            return f"{self.made_by} left {name or 'the program'} inconsistent\n"
        return f"this {self.program.level} program is inconsistent{name and f' at {name}'}\n"

    def error(self, node: fx.Node, why: str, *operands: object) -> VerifyError:
        """Return an error with the offending lines, the user's source line, the rule and the remedy."""
        lines = []
        for value in dict.fromkeys((*operands, node)):
            if isinstance(value, fx.Node) and value.op != "output" and has_record(value):
                source = record_of(value).source if value is node else ""
                lines.append(f"  {self.line(value)}{source and f'          {source}'}\n")
        return VerifyError(f"{self.head(node.name)}{''.join(lines)}  {why}")

    def line(self, node: fx.Node) -> str:
        try:
            return print_node(self.program, node)
        except (KeyError, TypeError, ValueError):  # a record that is broken
            return f"  {node.name} does not print"


def _implied_sizes(function: Any, arguments: Mapping[str, Any], at: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the (dim, size) of the operand that the piece sizes imply."""
    index = at[arguments["axis"]]
    if function in (transfers.all_gather, transfers.pend):
        return [(arguments["dim"], arguments["sizes"][index])]
    if function is transfers.all_to_all:
        return [(arguments["source"], arguments["sizes"][index]), (arguments["target"], sum(arguments["new_sizes"]))]
    return [(arguments["dim"], sum(arguments["sizes"]))]
