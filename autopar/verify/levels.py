"""Verify a program against the promises of its level. It runs after every pass, so that the error names the pass at
fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx

from autopar.errors import RuleError, VerifyError
from autopar.ir import transfers
from autopar.ir.computed_again import computed_again, hashable
from autopar.ir.edit import HALF_DONE, is_half_done
from autopar.ir.nodes import called_op, element_of, element_type, has_record, is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import PHASES, ROLES, Record, Requirement, TensorType
from autopar.ir.subaxes import overlap
from autopar.ir.text.printer import print_type
from autopar.rules.binding import bind_node, own_maker, split_of, splits_in_common
from autopar.rules.pointwise import CASTS
from autopar.verify.pieces import Subject, check_dtypes, check_local, check_placed, check_rule, check_untransferred

# -- every level -------------------------------------------------------------------------------------------------------
#
# Check what programs of every level promise: a header that fits, records, phases, and results that fit the tree.


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


# -- own ---------------------------------------------------------------------------------------------------------------
#
# Check values that are no data but each rank's own, and that ops which draw the same numbers are split alike.


def check_own(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that only its own backward reads what an op leaves on each rank."""
    if node.op not in ("call_function", "output") or is_getitem(node):
        return
    for position, value in enumerate(operands(node)):
        op = own_maker(value)
        if op is None:
            continue
        bound = bind_node(op)
        what = f"{value} is no data: {bound.rule.op} leaves each rank its own ({bound.pattern})"
        if node.target in transfers.BY_FUNCTION:
            raise of.error(node, f"{what}, and nothing moves it: remove this transfer, and read {value} itself", value)
        if node.op == "output":
            raise of.error(node, f"{what}, so it has no global value: do not return it", value)
        try:
            reads_own = position in bind_node(node).own[0]
        except RuleError:
            return  # check_rule says why
        if not reads_own:
            raise of.error(node, f"{what}, which only its own backward reads; read another result of {op}", value)


def check_drawn(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that an op is split like the one whose random numbers it draws again."""
    other = of.drawn_alike.get(node)
    if other is None:
        return
    mesh = next(need.placed.mesh for need in record.uses if need is not None)
    bound, bound_of_other = bind_node(node), bind_node(other)
    if splits_in_common(bound, split_of(node), bound_of_other, mesh) != splits_in_common(
        bound_of_other, split_of(other), bound, mesh
    ):
        raise of.error(
            node, f"it draws the random numbers of {other} again, and these are others for other pieces: split both "
            f"ops alike", other
        )  # fmt: skip


# -- streams -----------------------------------------------------------------------------------------------------------
#
# Check streams: each collective that is started is waited for, and only scheduled programs have any.
#
# The members of a message are started side by side on one stream, and waited for side by side, in one order:
#
#     a_dp_start : f32[8] = start all_reduce(a, dp) on dp in dp_0
#     b_dp_start : f32[4] = start all_reduce(b, dp) on dp in dp_0
#     …
#     a_dp : f32[8] = wait(a_dp_start)
#     b_dp : f32[4] = wait(b_dp_start)
#
# What is under way at the end of a run is a state. The next run waits for it, and its next value is the start of the
# same collective:
#
#     a_dp_start : f32[8] = state(a_dp_next_start) on dp
#     finish:
#       a_dp : f32[8] = wait(a_dp_start)
#       …
#     backward:
#       a_dp_next_start : f32[8] = start all_reduce(a, dp) on dp


def check_unstreamed(of: Subject, node: fx.Node, record: Record) -> None:
    if record.started or record.stream is not None or node.target is transfers.wait:
        raise of.error(node, f"a {of.program.level} program has no streams; only a scheduled one starts and waits")


def check_stream(of: Subject, node: fx.Node, record: Record) -> None:
    if record.stream is not None and record.stream not in of.program.streams:
        raise of.error(node, f"no stream {record.stream!r}; streams are {', '.join(of.program.streams) or 'none'}")
    if record.started and record.role == "state":
        of.unwaited[node] = None
    elif record.started:
        row = transfers.BY_FUNCTION.get(node.target)
        if row is None or not row.collective or row.function in (transfers.send, transfers.recv):
            raise of.error(node, "only a collective can be started and waited for")
        if record.stream is None:
            raise of.error(node, "a collective is started on a stream: add 'on' and the name of one")
        of.unwaited[node] = None
    elif record.message or record.span:
        raise of.error(node, "only a collective that is started is part of a message")
    check_message(of, node, record)
    if node.op == "output":
        check_under_way(of, node, record)
        return
    for value in operands(node):
        if record_of(value).started != (node.target is transfers.wait):
            if node.target is transfers.wait:
                raise of.error(node, f"{value.name} is not started: read it without waiting", value)
            raise of.error(node, f"{value.name} is only started here: read wait({value.name})", value)
        of.unwaited.pop(value, None)


def check_under_way(of: Subject, output: fx.Node, record: Record) -> None:
    """Check that each started state is replaced by the start of the same collective, and that no other result is only
    started."""
    homes = {node.name: node for node in of.program.placeholders}
    messages: dict[str, str] = {}
    for value, result in zip(operands(output), record.results, strict=True):
        about, home = record_of(value), homes.get(result.of)
        before = None if home is None or result.kind != "state" else record_of(home)
        if before is None or not before.started:
            if about.started:
                raise of.error(output, f"{value.name} is only started here: return wait({value.name})", value)
            continue
        same = (about.type, about.stream, about.span) == (before.type, before.stream, before.span)
        if not about.started or not same or messages.setdefault(before.message, about.message) != about.message:
            raise of.error(
                output,
                f"the state {result.of} was started before, so that {value.name}, its next value, is the start of the "
                f"same collective, with the same stream and elements, and in the same message",
                home,
                value,
            )
        of.unwaited.pop(value, None)
    nexts = {result.of: value for value, result in zip(operands(output), record.results, strict=True)}
    for earlier, later in messages.items():
        homes_of, values_of = of.messages.get(earlier, []), of.messages.get(later, [])
        if earlier and [nexts[home.name] for home in homes_of] != values_of:
            why = f"the messages {earlier} and {later} have other members, or another order"
            raise of.error(output, why, *homes_of)


def check_message(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that the members of a message stand side by side, where they are started and where they are waited for."""
    value = operands(node)[0] if node.target is transfers.wait else None
    message = record.message if value is None else record_of(value).message
    last, of.last_message = of.last_message, (message, value is not None)
    if not message:
        return
    members = of.messages.setdefault(message, [])
    if value is None:
        if members and (last != (message, False) or key_of_message(members[0]) != key_of_message(node)):
            raise of.error(
                node,
                f"the message {message} is started in two places, or has members that differ in transfer, axis, stream "
                f"or dtype: give them messages of their own",
                members[0],
            )
        members.append(node)
        return
    waited = of.waited.setdefault(message, [])
    if members[len(waited) : len(waited) + 1] != [value] or (waited and last != (message, True)):
        raise of.error(
            node,
            f"the members of the message {message} are waited for side by side, in the order in which they start: "
            f"{', '.join(member.name for member in members)}",
            value,
        )
    waited.append(value)


def key_of_message(node: fx.Node) -> tuple[object, ...]:
    """Return what the members of a message have in common."""
    record = record_of(node)
    type = record.type
    assert isinstance(type, TensorType)
    if node.op == "placeholder":
        return record.stream, type.dtype
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    return node.target, arguments["axis"], arguments.get("op", "sum"), arguments.get("stage"), record.stream, type.dtype


def check_waited(of: Subject) -> None:
    """Check, at the end of the program, that nothing is left to wait for."""
    if of.unwaited:
        node = next(iter(of.unwaited))
        raise of.error(node, f"{node.name} is started and never waited for: insert wait({node.name})")


# -- reductions --------------------------------------------------------------------------------------------------------
#
# Check that a pending value is reduced once: two sums of the same addends may differ in the last bit.


REDUCTIONS = (transfers.all_reduce, transfers.reduce_scatter)
ROUNDED = ("sum", "avg", "prod")  # reductions whose result depends on their order
PASSED = (transfers.wait, transfers.join_chunks)  # of the transfer before


class _Way(NamedTuple):
    """How a value comes from one that an op has made: through which transfers, views and casts."""

    root: fx.Node
    steps: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()  # over which it is reduced by then


def check_reduced_once(of: Subject) -> None:
    """Check that no axis of a pending value is reduced in two ways.

    What waits through a view or a cast is the same value, and so is what the backward computes again. Equal reductions
    are one: ``share`` merges them.
    """
    ways: dict[fx.Node, _Way] = {}
    reduced: dict[fx.Node, list[tuple[str, _Way, fx.Node]]] = {}  # root → the axes, how each is reduced, and where
    for node in of.program.nodes:
        if node.op != "call_function" or not node.users or not operands(node):
            continue
        values = operands(node)
        if node.target in PASSED:
            if values[0] in ways:
                ways[node] = ways[values[0]]
            continue
        if node.target not in transfers.BY_FUNCTION and not (len(values) == 1 and _waits(of, node, values[0])):
            continue
        before = ways.get(values[0]) or _Way(values[0])
        axes: tuple[str, ...] = ()
        if node.target in REDUCTIONS and _rounds(node):
            axes = tuple(transfers.axes_of(transfers.arguments(node.target, node.args, node.kwargs)["axis"]))
            if any(overlap(axis, other) for axis in axes for other in before.axes):
                before = _Way(values[0])  # a sum is added up again: that is another value
        step = node.target, hashable(node.args[1:]), hashable(dict(node.kwargs))
        way = _Way(before.root, (*before.steps, step), (*before.axes, *axes))
        if axes:
            reduced.setdefault(way.root, []).extend((axis, way, node) for axis in axes)
        if of.program.level in ("local", "scheduled") or _pending(node):
            ways[node] = way
    roots = computed_again(of.program, reduced)
    first: dict[object, list[tuple[str, _Way, fx.Node]]] = {}
    for root, found in reduced.items():
        known = first.setdefault((roots.get(root, root), record_of(root).type), [])
        for axis, way, node in found:
            for other, its, at in known:
                if overlap(axis, other) and (axis != other or way.steps != its.steps):
                    raise of.error(node, _refusal(axis, at, node, root, its.root), root, *operands(at), at)
            known.append((axis, way, node))


def _refusal(axis: str, at: fx.Node, node: fx.Node, root: fx.Node, other: fx.Node) -> str:
    again = "" if root is other else f" (it is {other.name}, computed again)"
    return (
        f"{root.name}{again} is reduced over {axis} in two ways, {at.name} and {node.name}, and two orders of adding "
        f"differ in the last bit: reduce it once, and make the other Layout of {at.name}"
    )


def _rounds(node: fx.Node) -> bool:
    type = record_of(node).type
    floats = isinstance(type, TensorType) and (type.dtype.is_floating_point or type.dtype.is_complex)
    return floats and transfers.arguments(node.target, node.args, node.kwargs).get("op", "sum") in ROUNDED


def _pending(node: fx.Node) -> bool:
    type = record_of(node).type
    return isinstance(type, TensorType) and bool(type.attr.pending)


def _waits(of: Subject, node: fx.Node, value: fx.Node) -> bool:
    """Return whether a pending value waits through a view or a cast."""
    if of.program.level != "explicit" or not (_pending(node) and _pending(value)):
        return False
    return called_op(node) in CASTS or bind_node(node).rule.view


# -- levels ------------------------------------------------------------------------------------------------------------


CHECKS: dict[str, tuple[Callable[[Subject, fx.Node, Record], None], ...]] = {  # level → the checks of each node
    "traced": (check_record, check_dtypes, check_untransferred, check_unstreamed),
    "placed": (check_record, check_placed, check_own, check_rule, check_drawn, check_untransferred, check_unstreamed),
    "explicit": (check_record, check_placed, check_own, check_rule, check_drawn, check_unstreamed),
    "local": (check_record, check_local, check_unstreamed),
    "scheduled": (check_record, check_local, check_stream),
}
REDUCES = ("explicit", "local", "scheduled")  # levels with transfers


def verify(program: Program, made_by: str = "") -> None:
    """Raise ``VerifyError`` for the first node that breaks a promise of the program's level. Linear in the graph.

    Args:
        made_by: the pass that made the program, named in the error.
    """
    of = Subject(program, made_by)
    check_header(of)
    seen: set[fx.Node] = set()
    names: set[str] = set()
    checks = CHECKS[program.level]
    for node in program.nodes:
        if not has_record(node):
            raise of.error(node, "every node has a record; this one was made without program.edit()")
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise of.error(node, f"{operand.name} is read before it is made")
        if node.name in names:
            raise of.error(node, f"the name {node.name} is given twice")
        seen.add(node)
        names.add(node.name)
        record = record_of(node)
        for check in checks:
            check(of, node, record)
    check_waited(of)
    if program.level in REDUCES:
        check_reduced_once(of)


Program.verifier = verify
