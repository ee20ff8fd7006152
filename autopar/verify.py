"""Verification: what each level promises, checked after every pass, so that a mistake is reported against its pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar import transfers
from autopar.errors import RuleError, VerifyError
from autopar.layout import UNDECIDED, Layout
from autopar.program import Program, element_type, is_getitem, operands, record_of
from autopar.record import PHASES, ROLES, Record, Requirement, TensorType
from autopar.rules.binding import bind_node
from autopar.text.printer import print_node, print_requirement, print_type


def verify(program: Program, made_by: str = "") -> None:
    """Raise ``VerifyError`` for the first node that breaks a promise of the program's level; linear.

    Args:
        made_by: the pass that made the program, named in the error.
    """
    _Verifier(program, made_by).run()


class _Verifier:
    def __init__(self, program: Program, made_by: str) -> None:
        self.program = program
        self.made_by = made_by

    def run(self) -> None:
        checks: dict[str, tuple[Callable[[fx.Node, Record], None], ...]] = {
            "traced": (self.check_untransferred,),
            "placed": (self.check_placed, self.check_rule, self.check_untransferred),
            "explicit": (self.check_placed, self.check_rule),
            "local": (self.check_local,),
            "scheduled": (self.check_local, self.check_stream),
        }
        seen: dict[fx.Node, None] = {}
        names: set[str] = set()
        self.unwaited: dict[fx.Node, None] = {}
        self.check_header()
        for node in self.program.nodes:
            record = node.meta.get("autopar")
            if record is None:
                raise self.error(node, "every node has a record; this one was made without program.edit()")
            for operand in node.all_input_nodes:
                if operand not in seen:
                    raise self.error(node, f"{operand.name} is read before it is made")
            if node.name in names:
                raise self.error(node, f"the name {node.name} is given twice")
            seen[node] = None
            names.add(node.name)
            self.check_record(node, record)
            for check in checks[self.program.level]:
                check(node, record)
        if self.unwaited:
            node = next(iter(self.unwaited))
            raise self.error(node, f"{node.name} is started and never waited for: add wait({node.name})")

    # -- every level ---------------------------------------------------------------------------------------------

    def check_header(self) -> None:
        program = self.program
        if program.level != "traced" and program.mesh is None:
            raise VerifyError(self.head("") + f"  a {program.level} program lies on a mesh; the header names none")
        if (program.level in ("local", "scheduled")) != (program.coordinates is not None):
            raise VerifyError(self.head("") + "  local and scheduled programs, and only they, are those of one rank's coordinates")
        if program.coordinates is not None and program.mesh is not None:
            program.mesh.rank(program.coordinates)

    def check_record(self, node: fx.Node, record: Record) -> None:
        if record.phase not in PHASES:
            raise self.error(node, f"no phase {record.phase!r}; phases are {', '.join(PHASES)}")
        if node.op == "placeholder" and record.role not in ROLES:
            raise self.error(node, f"no role {record.role!r}; roles are {', '.join(ROLES)}")
        if node.op == "output":
            if len(record.results) != len(operands(node)):
                raise self.error(node, f"{len(operands(node))} results, but the record tells what {len(record.results)} of them are")
        elif not isinstance(record.type, (TensorType, tuple)):
            raise self.error(node, "every value has a type")
        if is_getitem(node) and record.type != element_type(node):
            raise self.error(node, f"element {node.args[1]} is {print_type(element_type(node))}", node.args[0])

    def check_untransferred(self, node: fx.Node, record: Record) -> None:
        if node.target in transfers.BY_FUNCTION:
            raise self.error(node, f"a {self.program.level} program has no transfers; reshard inserts them")

    # -- placed and explicit -------------------------------------------------------------------------------------

    def check_placed(self, node: fx.Node, record: Record) -> None:
        types = record.type if isinstance(record.type, tuple) else (record.type,)
        for type in types:
            if type is None:
                continue
            if type.layout is None:
                raise self.error(node, f"at the level {self.program.level} every value has a Layout")
            self.check_layout(node, type, type.layout)
        if node.target in transfers.BY_FUNCTION:
            return
        if node.op in ("call_function", "output"):
            values = operands(node)
            if len(record.uses) != len(values):
                raise self.error(node, f"{len(values)} operands, but {len(record.uses)} requirements: every use has one")
            for value, need in zip(values, record.uses, strict=True):
                type = record_of(value).type
                if isinstance(type, TensorType):
                    if need is None:
                        raise self.error(node, f"the use of {value.name} has no requirement", value)
                    self.check_layout(node, type, need.layout)
                    if self.program.level == "explicit" and need != Requirement(type.layout, type.dtype):  # type: ignore[arg-type]
                        self.check_agreement(node, value, type, need)

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
            raise self.error(node, f"the axis {twice} is used twice on one value; each axis splits it, or is pending, once")
        if attr.normalize(type.shape, mesh) != attr:
            raise self.error(node, "the Layout is not in its normal form; make it with DistAttr.normalize")

    def check_rule(self, node: fx.Node, record: Record) -> None:
        if node.op != "call_function" or is_getitem(node):
            return
        values = operands(node)
        row = transfers.BY_FUNCTION.get(node.target)
        if row is not None:
            given = transfers.arguments(node.target, node.args, node.kwargs)
            try:
                want = row.infer(record_of(values[0]).type, given, self.program.stages)  # type: ignore[arg-type]
            except ValueError as error:
                raise self.error(node, str(error), values[0]) from None
            if want != record.type:
                raise self.error(node, f"{row.name} makes it {print_type(want)}", values[0])
            return
        try:
            bound = bind_node(node)
        except RuleError as error:
            raise self.error(node, str(error), *values) from None
        results = record.type if isinstance(record.type, tuple) else (record.type,)
        needs = [need.layout.attr for need in record.uses if need is not None]
        gives = [None if r is None else r.attr for r in results]
        meshes = {need.layout.mesh for need in record.uses if need} | {r.layout.mesh for r in results if r and r.layout}
        if len(meshes) > 1:
            raise self.error(node, "operands and results lie on different meshes; an op runs on one: insert a send and a recv", *values)
        if why := bound.check(next(iter(meshes)), needs, gives, [v.name for v in values]):
            raise self.error(node, why, *values)

    def check_agreement(self, node: fx.Node, value: fx.Node, type: TensorType, need: Requirement) -> None:
        raise self.error(
            node,
            f"{node.name} needs {value.name} as {print_requirement(need, type)}, but it is {print_type(type)}: "
            f"a transfer is missing between them",
            value,
        )

    # -- local and scheduled -------------------------------------------------------------------------------------

    def check_local(self, node: fx.Node, record: Record) -> None:
        types = record.type if isinstance(record.type, tuple) else (record.type,)
        if any(type is not None and type.layout is not None for type in types) or record.uses:
            raise self.error(node, f"a {self.program.level} program has the sizes of one rank and no Layouts")
        row = transfers.BY_FUNCTION.get(node.target)
        if row is None or not isinstance(record.type, TensorType) or self.program.mesh is None:
            return
        given = transfers.arguments(node.target, node.args, node.kwargs)
        if "axis" in given:
            count = self.program.mesh.sizes[self.program.mesh.check_axis(given["axis"])]
            for key in ("sizes", "new_sizes"):
                if key in given and len(given[key]) != count:
                    raise self.error(node, f"{key} lists {len(given[key])} pieces, the axis {given['axis']} has {count}")
        self.check_pieces(node, record.type, given)

    def check_pieces(self, node: fx.Node, type: TensorType, given: dict[str, object]) -> None:
        """The explicit piece sizes agree with the local shapes at both ends."""
        source = record_of(operands(node)[0]).type
        if not isinstance(source, TensorType) or "sizes" not in given or self.program.coordinates is None:
            return
        want = transfers.local_shape(node.target, source.shape, given, self.program.coordinates)
        if want != type.shape:
            raise self.error(node, f"its pieces make it {list(want)}", operands(node)[0])

    def check_stream(self, node: fx.Node, record: Record) -> None:
        if record.stream is not None and record.stream not in self.program.streams:
            raise self.error(node, f"no stream {record.stream!r}; streams are {', '.join(self.program.streams) or 'none'}")
        if record.started:
            row = transfers.BY_FUNCTION.get(node.target)
            if row is None or not row.collective:
                raise self.error(node, "only a collective can be started and waited for")
            self.unwaited[node] = None
        for value in operands(node):
            if record_of(value).started:
                if node.target is not transfers.wait:
                    raise self.error(node, f"{value.name} is only started here: read wait({value.name})", value)
                self.unwaited.pop(value, None)

    # -- errors --------------------------------------------------------------------------------------------------

    def head(self, name: str) -> str:
        maker = self.made_by or f"this {self.program.level} program"
        return f"{maker} left {name} inconsistent\n" if name and self.made_by else f"{maker} is inconsistent{f' at {name}' if name else ''}\n"

    def error(self, node: fx.Node, why: str, *operands: object) -> VerifyError:
        lines = []
        for value in (*dict.fromkeys(operands), node):
            if isinstance(value, fx.Node) and value.op != "output" and "autopar" in value.meta:
                line = "  " + print_node(self.program, value)
                source = record_of(value).source if value is node else ""
                lines.append(f"{line}          {source}" if source else line)
        quoted = "\n".join(lines)
        return VerifyError(f"{self.head(node.name)}{quoted}{chr(10) if quoted else ''}  {why}")
