"""Check what programs of every level promise: a header that fits, records, phases, and results that fit the tree."""

from __future__ import annotations

from torch import fx

from autopar.errors import VerifyError
from autopar.ir.edit import HALF_DONE, is_half_done
from autopar.ir.nodes import element_of, element_type, is_getitem, operands, record_of
from autopar.ir.record import PHASES, ROLES, Record, Requirement, TensorType
from autopar.ir.text.printer import print_type
from autopar.verify.subject import Subject

ORDER = ("return", "grad", "state")  # the order of results


def check_header(of: Subject) -> None:
    program, level = of.program, of.program.level
    if is_half_done(program):
        raise VerifyError(f"{of.head()}  {HALF_DONE}")
    if level != "traced" and program.mesh is None:
        raise VerifyError(f"{of.head()}  a {level} program needs a mesh; the header names none")
    if (level in ("local", "scheduled")) != (program.coordinates is not None):
        raise VerifyError(f"{of.head()}  local and scheduled programs, and no others, have the coordinates of one rank")
    if program.coordinates is not None and program.mesh is not None:
        if program.coordinates.keys() != program.mesh.sizes.keys():
            raise VerifyError(f"{of.head()}  the coordinates need one index for each axis of the mesh ({program.mesh})")
        try:
            program.mesh.rank(program.coordinates)
        except ValueError as error:
            raise VerifyError(f"{of.head()}  {error}") from None


def check_record(of: Subject, node: fx.Node, record: Record) -> None:
    if record.phase not in PHASES:
        raise of.error(node, f"no phase {record.phase!r}; phases are {', '.join(PHASES)}")
    if node.op == "placeholder" and record.role not in ROLES:
        raise of.error(node, f"no role {record.role!r}; roles are {', '.join(ROLES)}")
    if node.op == "output":
        check_results(of, node, record)
    elif not isinstance(record.type, (TensorType, tuple)):
        raise of.error(node, "every value has a type")
    if node.op == "call_function":
        check_phase(of, node, record)
    if is_getitem(node):
        source, index = element_of(node)
        types = record_of(source).type
        if not isinstance(types, tuple) or not 0 <= index < len(types):
            raise of.error(node, f"{source} has no element {index}", source)
        if record.type != element_type(node):
            raise of.error(node, f"element {index} is {print_type(element_type(node))}", source)


def check_phase(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that no node reads a value of a later phase."""
    for value in node.all_input_nodes:
        about = record_of(value)
        if about.role and about.role != "tangent":
            continue  # all phases read what the program takes
        phase = "backward" if about.role == "tangent" else about.phase
        if phase in PHASES and PHASES.index(phase) > PHASES.index(record.phase):
            raise of.error(
                node,
                f"{node.name} is part of the {record.phase} and reads {value.name}, which is part of the {phase}",
                value,
            )


def check_results(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that returned values fit the tree, and that gradients and states belong to placeholders that may have
    them."""
    values, results = operands(node), record.results
    if len(results) != len(values):
        raise of.error(node, f"{len(values)} results, but the record describes {len(results)} of them")
    returned = sum(result.kind == "return" for result in results)
    if len(of.program.tree) != (returned + 1 if returned or of.program.tree else 0):
        raise of.error(
            node, f"{returned} values are returned, but the tree has places for {max(len(of.program.tree) - 1, 0)}"
        )
    homes = {p.name: p for p in of.program.placeholders}
    states = [name for name, p in homes.items() if record_of(p).role == "state"]
    if [r.of for r in results if r.kind == "state"] != states:
        raise of.error(
            node,
            f"each state is replaced once, in the order of the placeholders: {', '.join(states) or 'there are none'}",
        )
    if list(results) != sorted(results, key=lambda r: ORDER.index(r.kind)):
        raise of.error(node, "results are in the order: returned values, gradients, states")
    for index, (value, result) in enumerate(zip(values, results, strict=True)):
        if result.kind == "return":
            continue
        if result.of not in homes:
            raise of.error(node, f"there is no placeholder {result.of} to have {value} as its {result.kind}", value)
        home_type, value_type = record_of(homes[result.of]).type, record_of(value).type
        if (
            not isinstance(home_type, TensorType)
            or not isinstance(value_type, TensorType)
            or home_type.shape != value_type.shape
        ):
            raise of.error(
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
            raise of.error(
                node,
                f"{result.of} and its next value must have the same Layout: require {value} as {print_type(home_type)}",
                homes[result.of],
                value,
            )
