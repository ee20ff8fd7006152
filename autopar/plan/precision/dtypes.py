"""Compute the dtype in which each op of a traced program runs under a policy, and the dtype of its result.

This takes three linear walks. The walks are the forward in order, the sums of gradients in reverse order, and the
backward in order. ``Record.call`` names the call that an op of the backward belongs to. The op runs as in autograd: an
incoming gradient has the dtype of its value, a value that the forward kept has the dtype in which the forward used it,
and a result has the dtype that torch promotes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.nodes import called_op, is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import belongs_to_step
from autopar.plan.precision.policy import Kind, PrecisionPolicy
from autopar.plan.precision.summed import ADD, Summed, shape_of
from autopar.rules.pointwise import CASTS
from autopar.rules.registry import RULES, op_name

F32 = torch.float32
FLOATS = frozenset({torch.float16, torch.bfloat16, F32})  # the dtypes that a policy changes

STATISTICS: dict[str, tuple[int, ...]] = {  # results that are float32 for operands of any dtype
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_flash_attention": (1,),
    "_scaled_dot_product_efficient_attention": (1,),
    "_scaled_dot_product_cudnn_attention": (1,),
    "_scaled_dot_product_fused_attention_overrideable": (1,),
    "_weight_norm_interface": (1,),
}
FORWARD_OF = {  # op of a backward, in a program without calls in its records → the op whose list it follows
    "_softmax_backward_data": "_softmax", "_log_softmax_backward_data": "_log_softmax",
    "nll_loss_backward": "nll_loss_forward", "nll_loss2d_backward": "nll_loss2d_forward",
    "logsumexp_backward": "logsumexp", "_prelu_kernel_backward": "_prelu_kernel",
}  # fmt: skip

Made = torch.dtype | tuple[torch.dtype | None, ...] | None


@dataclass
class Dtypes:
    """The dtypes of one program.

    Attributes:
        parameters: parameters that are in low precision from the start.
        made: node → the dtype of its result, or of each result.
        read_dtypes: value → the dtype in which its readers take it, if the value is computed in another one.
        uses: node → the dtype in which it takes each operand; ``None``: unchanged.
    """

    program: Program
    policy: PrecisionPolicy
    device: str
    parameters: frozenset[fx.Node] = frozenset()
    made: dict[fx.Node, Made] = field(default_factory=dict)
    read_dtypes: dict[fx.Node, torch.dtype | None] = field(default_factory=dict)
    uses: dict[fx.Node, tuple[torch.dtype | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.apart = _taken_apart(self.program)
        results = record_of(self.program.output).results
        self.replaced = {result.of for result in results if result.kind == "state"}  # they add up, in their own dtype
        self.tables: set[fx.Node] = set()  # values computed from buffers, indices and constants alone
        # parameters, buffers, and values computed from them alone, if the policy starts in low precision
        self.weak: set[fx.Node] = set()
        self.moving: set[fx.Node] = set()  # values computed from tangents
        self.numbers: set[fx.Node] = set()  # inputs that are Python numbers: beside tensors their dtype does not count
        self.statistics: set[fx.Node] = set()
        self.asked: dict[
            tuple[int, fx.Node], torch.dtype | None
        ] = {}  # (call, value) → the dtype in which the call used the value
        self.incoming: dict[int, torch.dtype] = {}  # call → the dtype of the incoming gradient of its backward
        self.result: dict[int, torch.dtype | None] = {}  # call → the dtype in which readers see its result
        self.summed = Summed()
        self.demand: dict[fx.Node, torch.dtype] = {}
        self.readers: dict[
            fx.Node, list[torch.dtype | None]
        ] = {}  # weak placeholder → the dtypes that its users require

    def run(self) -> Dtypes:
        nodes = list(self.program.nodes)
        output = nodes[-1]
        for node in nodes:
            record = record_of(node)
            if node.op in ("placeholder", "get_attr"):
                self._placeholder(node)
            elif node.op == "call_function" and record.phase == "forward":
                self._forward(node)
        self._tangents(output)
        for node in nodes:
            if (
                record_of(node).phase == "backward"
                and node.op == "call_function"
                and self.moving.intersection(node.all_input_nodes)
            ):
                self.moving.add(node)
        self.summed.returning = {call.number for node in self.moving if (call := record_of(node).call) is not None}
        named = {node.name: node for node in self.program.placeholders}
        homes: dict[fx.Node, list[fx.Node]] = {}
        for value, result in zip(operands(output), record_of(output).results, strict=True):
            if result.kind == "grad":
                homes.setdefault(value, []).append(named[result.of])
        for node in reversed(nodes):
            if node in self.moving and self._adds_up(node):
                self._demand(node, output, homes)
        for node in nodes:
            if node.op == "call_function" and record_of(node).phase == "backward":
                self._element(node) if is_getitem(node) else self._backward(
                    node
                ) if node in self.moving else self._saved(node)
        return self

    # -- inputs --------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        record = record_of(node)
        assert isinstance(record.type, TensorType)
        dtype = record.type.dtype
        self.made[node] = self.policy.low if node in self.parameters else dtype
        if record.role == "input" and belongs_to_step(record.name):
            self.numbers.add(node)
            return
        if record.role == "tangent":
            self.moving.add(node)
        elif record.role != "param" and not (record.role == "input" and dtype.is_floating_point):
            self.tables.add(node)
        if self.policy.parameters and dtype == F32:
            if record.role == "input":
                self.read_dtypes[node] = self.policy.low
            elif record.role in ("param", "buffer", "state") and node.name not in self.replaced:
                self.weak.add(node)

    def _tangents(self, output: fx.Node) -> None:
        """Give each tangent the dtype of its value."""
        returned = [
            value
            for value, result in zip(operands(output), record_of(output).results, strict=True)
            if result.kind == "return"
        ]
        for node in self.moving:
            index = record_of(node).index
            assert index is not None
            self.made[node] = self.made[returned[index]]

    # -- forward -------------------------------------------------------------------------------------------------

    def _forward(self, node: fx.Node) -> None:
        if is_getitem(node):
            self._element(node)
            return
        values = operands(node)
        tensors = [value for value in values if value not in self.numbers]
        if all(value in self.tables for value in tensors):
            self.tables.add(node)
        elif tensors and self.weak.issuperset(tensors):
            self.weak.add(node)
        call = record_of(node).call
        kind = self._kind(node, values)
        dtype, wants = self._runs(node, values, kind, [self._read_dtype(value) for value in values])
        self._set(node, dtype, wants)
        if call is not None:
            inner_values = {
                value
                for value in values
                if (about := record_of(value).call) is not None and about.number == call.number
            }
            for value, want in zip(values, wants, strict=True):
                if value not in inner_values:
                    self.asked[call.number, value] = want
            if dtype is not None:
                self.incoming[call.number] = self.result[call.number] = dtype
                self.summed.results[call.number] = node
        if kind is Kind.INSIDE and dtype is not None:
            first = next((self._read_dtype(value) for value in values if self._is_float(value)), dtype)
            if call is not None and call.number in self.apart:
                first = self.apart[call.number] = self.apart[call.number] or first
                self.result[call.number] = first
            self.read_dtypes[node] = first
        if node not in self.weak and dtype is not None:
            self._tally(values, kind, wants, dtype)

    def _kind(self, node: fx.Node, values: Sequence[fx.Node]) -> Kind:
        call = record_of(node).call
        listed_by_op = self.policy.kind(called_op(node).name(), self.device)
        if _names_dtype(node):
            return Kind.PROMOTED
        listed = listed_by_op if call is None else self.policy.kind(call.op, self.device)
        if call is not None and call.number in self.apart:
            return Kind.F32 if listed is Kind.F32 else Kind.INSIDE
        if listed is Kind.LOW and all(value in self.tables for value in values if self._is_float(value)):
            return listed_by_op if listed_by_op is not Kind.LOW else Kind.WIDEST
        return listed

    def _runs(
        self, node: fx.Node, values: Sequence[fx.Node], kind: Kind, have: Sequence[torch.dtype | None]
    ) -> tuple[torch.dtype | None, list[torch.dtype | None]]:
        """Return the dtype in which an op runs, and the dtype in which it takes each operand.

        The first is ``None`` if it has no floating operand.

        Args:
            have: the dtype in which this op sees each operand.
        """
        floats = [k for k, dtype in enumerate(have) if dtype in FLOATS]
        if not floats or any(dtype == torch.float64 or (dtype is not None and dtype.is_complex) for dtype in have):
            return None, list(have)
        counted = [k for k in floats if values[k] not in self.weak]
        if not counted and node not in self.weak and self.weak:  # such as a look-up of a parameter's rows
            dtype = self.policy.low
        else:
            dtype = _promoted([(seen, _rank(values[k])) for k in counted or floats if (seen := have[k]) is not None])
        if kind in (Kind.LOW, Kind.F32, Kind.INSIDE):
            dtype = self.policy.low if kind is Kind.LOW else F32
        wants = [
            own_dtype
            if k not in floats
            or value in self.statistics
            or (kind is Kind.PROMOTED and (value not in self.weak or own_dtype == dtype))
            else dtype
            for k, (value, own_dtype) in enumerate(zip(values, have, strict=True))
        ]
        return dtype, wants

    def _set(self, node: fx.Node, dtype: torch.dtype | None, wants: Sequence[torch.dtype | None]) -> None:
        """Note the dtypes of an op's operands and results.

        A result that is not floating, or whose dtype the call names, stays as captured.
        """
        values = operands(node)
        # torch would promote the number
        if dtype is not None and not _rank(node) and not self.numbers.isdisjoint(values):
            wants = [dtype if value in self.numbers else want for value, want in zip(values, wants, strict=True)]
        cast = node.target in CASTS and _names_dtype(node)
        self.uses[node] = tuple(
            None if cast or want == self.made[value] else want for value, want in zip(values, wants, strict=True)
        )
        captured = record_of(node).type
        fixed = STATISTICS.get(_packet(node), ())
        types = captured if isinstance(captured, tuple) else (captured,)
        named = _names_dtype(node)
        dtypes = tuple(
            None if result is None else result.dtype if dtype is None or named or result.dtype not in FLOATS
            or k in fixed else dtype
            for k, result in enumerate(types)
        )  # fmt: skip
        self.made[node] = dtypes if isinstance(captured, tuple) else dtypes[0]

    def _element(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        dtypes = self.made[source]
        assert isinstance(dtypes, tuple)
        self.made[node] = dtypes[index]
        if index == 0 and source in self.read_dtypes:
            self.read_dtypes[node] = self.read_dtypes[source]
        if index in STATISTICS.get(_packet(source), ()):
            self.statistics.add(node)
        for group in (self.tables, self.weak, self.moving):
            if source in group:
                group.add(node)

    def _tally(
        self, values: Iterable[fx.Node], kind: Kind, required_dtypes: Sequence[torch.dtype | None], dtype: torch.dtype
    ) -> None:
        for value, required in zip(values, required_dtypes, strict=True):
            if value in self.weak:
                while value.op == "call_function" and _is_view(value):
                    (value,) = operands(value)
                if value.op == "placeholder":
                    self.readers.setdefault(value, []).append(dtype if kind is Kind.PROMOTED else required)

    # -- backward ------------------------------------------------------------------------------------------------

    def _adds_up(self, node: fx.Node) -> bool:
        """Return whether an addition accumulates two gradients of one value, as autograd does.

        The sum belongs to no call.
        """
        values, call = operands(node), record_of(node).call
        if (
            node.target is not ADD
            or node.kwargs
            or len(values) != 2
            or not self.moving.issuperset(values)
            or call is None
        ):
            return False
        inside = any(
            user not in self.summed.of and (about := record_of(user).call) is not None and about.number == call.number
            for user in node.users
        )
        return not inside and all(shape_of(value) == shape_of(node) for value in values)

    def _demand(self, node: fx.Node, output: fx.Node, homes: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
        """Accumulate gradients in the dtype of their value, as autograd does.

        Args:
            homes: gradient that the program returns → its placeholders.
        """
        floats = [
            dtype
            for value in self.summed.note(node, output, homes)
            if isinstance(dtype := self._dtype_of(value), torch.dtype) and dtype in FLOATS
        ]
        if floats:
            self.demand[node] = _widest(floats)

    def _dtype_of(self, value: fx.Node) -> Made:
        """Return the dtype in which a call returns a value."""
        call = record_of(value).call
        return self.made[value] if call is None else self.result.get(call.number, self.made[value])

    def _backward(self, node: fx.Node) -> None:
        values, call = operands(node), record_of(node).call
        listed_by_op = self.policy.kind(f"aten::{_packet(node)}", self.device)
        have = [self._read_dtype(value) for value in values]
        incoming = None if call is None else self.incoming.get(call.number)
        if node in self.summed.of:
            dtype = self.demand.get(node)
            self._set(
                node, dtype or _widest(d for d in have if d in FLOATS), have if dtype is None else [dtype] * len(values)
            )
            return
        if call is None or incoming is None:  # the program does not name the forward call
            name = FORWARD_OF.get(_packet(node), _packet(node).removesuffix("_backward"))
            listed = self.policy.kind(f"aten::{name}", self.device)
            kind = Kind.F32 if listed is Kind.INSIDE else listed
            self._set(node, *self._runs(node, values, kind, have))
            return
        for k, value in enumerate(values):
            about = record_of(value).call
            if have[k] not in FLOATS:
                continue
            if about is not None and about.number == call.number and value not in self.summed.of:
                have[k] = self._made(value)
            elif value in self.moving:
                have[k] = incoming
            else:
                have[k] = self.asked.get((call.number, value), have[k])
        if (
            _is_view(node)
            and have[0] != (computed := self._made(values[0]))
            and have[0] is not None
            and computed is not None
            and torch.promote_types(have[0], computed) == have[0]
        ):
            have[0] = computed  # its readers widen it, so that only half the bytes are moved before
        if listed_by_op is Kind.PROMOTED:
            dtype, wants = self._runs(node, values, listed_by_op, have)
            wants = have
        else:  # a kernel with one dtype, that of the gradient
            dtype = _widest(
                [d for d, value in zip(have, values, strict=True) if value in self.moving and d in FLOATS] or [incoming]
            )
            wants = [
                d if d not in FLOATS or value in self.statistics else dtype
                for d, value in zip(have, values, strict=True)
            ]
        self._set(node, dtype, wants)

    def _saved(self, node: fx.Node) -> None:
        """Set the dtypes of an op in the backward that computes from values of the forward, such as a recomputed op."""
        values, call = operands(node), record_of(node).call
        have = [self._read_dtype(value) for value in values]
        for k, value in enumerate(values):
            about = record_of(value).call
            if call is not None and have[k] in FLOATS:
                same_call = about is not None and about.number == call.number
                have[k] = self._made(value) if same_call else self.asked.get((call.number, value), have[k])
        kind = Kind.PROMOTED if _names_dtype(node) else self.policy.kind(f"aten::{_packet(node)}", self.device)
        dtype, wants = self._runs(node, values, kind, have)
        self._set(node, dtype, wants)

    # -- values --------------------------------------------------------------------------------------------------

    def _read_dtype(self, value: fx.Node) -> torch.dtype | None:
        dtype = None if value in self.numbers else self.read_dtypes.get(value) or self.made[value]
        return dtype if isinstance(dtype, torch.dtype) else None

    def _made(self, value: fx.Node) -> torch.dtype | None:
        """Return the dtype that an operand is computed in; an operand is one tensor."""
        dtype = self.made[value]
        assert not isinstance(dtype, tuple)
        return dtype

    def _is_float(self, value: fx.Node) -> bool:
        return self._read_dtype(value) in FLOATS


def low_parameters(program: Program, policy: PrecisionPolicy, device: str) -> frozenset[fx.Node]:
    """Return the parameters most of whose uses are in low precision."""
    if not policy.parameters:
        return frozenset()
    readers = Dtypes(program, policy, device).run().readers
    return frozenset(
        node for node, wants in readers.items()
        if record_of(node).role == "param" and 2 * sum(want == policy.low for want in wants) > len(wants)
    )  # fmt: skip


def _taken_apart(program: Program) -> dict[int, torch.dtype | None]:
    """Return the calls of the forward that were decomposed into several ops, not all of them views."""
    counts: dict[int, list[bool]] = {}
    for node in program.nodes:
        record = record_of(node)
        if (
            node.op == "call_function"
            and record.phase == "forward"
            and record.call is not None
            and not is_getitem(node)
        ):
            counts.setdefault(record.call.number, []).append(_is_view(node))
    return {number: None for number, views in counts.items() if len(views) > 1 and not all(views)}


def _is_view(node: fx.Node) -> bool:
    rule = RULES.get(called_op(node))
    return rule is not None and rule.view


def _names_dtype(node: fx.Node) -> bool:
    """Return whether a call names the dtype of its result."""
    return any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values()))


def _packet(node: fx.Node) -> str:
    return op_name(called_op(node)).partition(".")[0]


def _rank(node: fx.Node) -> int:
    return len(shape_of(node) or ())


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    widest: torch.dtype | None = None
    for dtype in dtypes:
        widest = dtype if widest is None else torch.promote_types(widest, dtype)
    assert widest is not None
    return widest


def _promoted(operands: Sequence[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the dtype to which torch promotes operands: operands without dims do not count beside others."""
    return _widest([dtype for dtype, rank in operands if rank] or [dtype for dtype, _ in operands])
