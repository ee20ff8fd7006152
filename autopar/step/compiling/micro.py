"""Make the program of one micro-batch: forward and backward, with states in which losses and gradients add up.

    w : f32[8 4] = param                            w : f32[8 4] = param
    x : f32[6 4] = input                            x : f32[6 4] = input
    d_out : f32[] = tangent(0)                      w_grad : f32[8 4] = state(w_grad_sum, 'w.grad')
    forward:                                        loss : f32[] = state(loss_sum, '.loss')
      …                                             forward:
      out : f32[] = div.Scalar(sum_1, 6)     →        …
    backward:                                         out : f32[] = div.Scalar(sum_1, 6)
      … = f(d_out)                                    share : f32[] = mul.Scalar(out, 0.5)
      mm : f32[8 4] = mm(t, x)                        loss_sum : f32[] = add.Tensor(loss, share)
      return out                                    backward:
      grad w = mm                                     full : f32[] = full([], 0.5)
                                                      … = f(full)
                                                      mm : f32[8 4] = mm(t, x)
                                                      w_grad_sum : f32[8 4] = add.Tensor(w_grad, mm)

This is the program for two micro-batches: the loss of each counts half, or wholly if it is a sum over rows. A gradient
is added to its sum as soon as it is computed, so that no gradient takes memory longer than needed. Other outputs of the
model are computed only if the loss needs them or the step returns them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.ir.nodes import is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import LOSS, SCALE, count_name, gradient_name
from autopar.rules.registry import rule_of
from autopar.step.batches.counts import counted_as
from autopar.step.batches.more_rows import MoreRows
from autopar.step.batches.terms import Terms, terms_of
from autopar.step.compiling.graph_builder import GraphBuilder, type_of
from autopar.step.compiling.outputs import Output, outputs_of
from autopar.torch_private import aten, returns_alias


@dataclass(frozen=True)
class Micro:
    """The program of one micro-batch, traced.

    Attributes:
        terms: the terms of the traced program's loss; the program takes their counts as inputs ``.count.0``, ….
        gradients: the names of the parameters that have a gradient.
        outputs: the outputs of the model that the program returns.
    """

    program: Program
    terms: Terms
    gradients: tuple[str, ...]
    outputs: tuple[Output, ...] = ()


def micro_of(traced: Program, microbatches: int, device: torch.device, wanted: Collection[str], cut: Collection[str], *,
             scaled: bool = False, returns: Mapping[str, str] | None = None,
             names: Sequence[str] = (), more_rows: MoreRows | None = None) -> Micro:  # fmt: skip
    """Make the program of one of ``microbatches`` micro-batches; linear in the graph.

    Args:
        traced: a captured step with one tangent, that of its loss.
        wanted: the names of the parameters whose gradients are needed; other gradients are not computed.
        cut: the names of the inputs that are cut into micro-batches along dim 0.
        scaled: whether gradients are those of the loss times the input ``.scale``.
        returns: output → how the outputs of micro-batches are joined, where the user says it; ``None``: no outputs are
            returned.
        names: the names of all tensors that the model returns.
        more_rows: tells which numbers follow from the number of rows.
    """
    micro = _Micro(traced, microbatches, device, wanted, cut, scaled, more_rows)
    outputs = (
        ()
        if returns is None
        else outputs_of(traced, micro.position, micro.terms, returns, names, microbatches, cut, device, more_rows)
    )
    return micro.run(outputs)


class _Micro:
    """Builds the program of one micro-batch."""

    def __init__(
        self,
        traced: Program,
        microbatches: int,
        device: torch.device,
        wanted: Collection[str],
        cut: Collection[str],
        scaled: bool,
        more_rows: MoreRows | None,
    ) -> None:
        self.traced, self.share, self.scaled = traced, 1 / microbatches, scaled
        self.builder = GraphBuilder(device)
        self.values: dict[fx.Node, fx.Node] = {}
        (self.tangent,) = (node for node in traced.placeholders if record_of(node).role == "tangent")
        rows = list(zip(operands(traced.output), record_of(traced.output).results, strict=True))
        self.returned = [node for node, result in rows if result.kind == "return"]
        position = record_of(self.tangent).index
        assert position is not None
        self.position = position
        self.loss = self.returned[self.position]
        self.terms = terms_of(traced, self.loss, cut, device, more_rows) if microbatches > 1 else Terms()
        if self.terms.adds:
            self.share = 1.0
        homes = {node.name: node for node in traced.placeholders}
        self.next = [(homes[result.of], node) for node, result in rows if result.kind == "state"]
        named = [(homes[result.of], node) for node, result in rows if result.kind == "grad"]
        uses = record_of(traced.output).uses or (None,) * len(rows)
        self.dtypes = {
            homes[result.of]: need.dtype
            for (_, result), need in zip(rows, uses, strict=True)
            if need is not None and result.kind == "grad"
        }
        self.gradients = [
            (home, node) for home, node in named if record_of(home).role == "param" and name_of(home) in wanted
        ]

    def run(self, outputs: tuple[Output, ...]) -> Micro:
        placeholders = [node for node in self.traced.placeholders if node is not self.tangent]
        seeds = [node for node in placeholders if record_of(node).role == "seed"]
        for node in placeholders:
            if node not in seeds:
                self.values[node] = self.builder.placeholder(node.name, record_of(node)._replace(name=name_of(node)))
        counts = self._counts()
        scale = (
            self.builder.placeholder(SCALE, Record(TensorType((), torch.float32), role="input", name=SCALE))
            if self.scaled
            else None
        )
        sums: dict[fx.Node, list[fx.Node]] = {}
        for home, node in self.gradients:
            sums.setdefault(node, []).append(
                self._state(
                    gradient_name(name_of(home)),
                    replace(type_of(node), dtype=self.dtypes.get(home) or type_of(node).dtype),
                )
            )
        loss = self._state(LOSS, type_of(self.loss))
        for node in seeds:
            self.values[node] = self.builder.placeholder(node.name, record_of(node))
        states: dict[fx.Node, fx.Node] = {}
        others = [node for k, node in enumerate(self.returned) if k != self.position] if outputs else []
        copies = {node: self._copy(node) for node in others if node.op == "placeholder"}
        for node in self.traced.nodes:
            if node.op not in ("call_function", "get_attr"):
                continue
            record = record_of(node)
            if record.phase == "backward" and self.tangent not in self.values:
                self._begin_backward(scale)
            divided = self.terms.divisions.get(node)
            values: Mapping[fx.Node, fx.Node] = (
                self.values if divided is None else {**self.values, divided: counts[divided]}
            )
            self.values[node] = self.builder.copy(node, values, self.traced.constants)
            self.builder.phase, self.builder.about = record.phase, record
            if node in others and _is_view_of_placeholder(node):
                copies[node] = self._copy(node)
            if node is self.loss:
                share = (
                    self.values[node]
                    if self.share == 1
                    else self.builder.inline(aten.mul.Scalar, self.values[node], self.share, name="share")
                )
                states[loss] = self.builder.inline(aten.add.Tensor, loss, share, name="loss_sum")
            for total in sums.get(node, ()):
                states[total] = self.builder.inline(aten.add.Tensor, total, self.values[node], name=f"{total.name}_sum")
        states |= {self.values[home]: self.values[node] for home, node in self.next}
        returned = [copies.get(node, self.values[node]) for node in others]
        program = self.builder.program(returned, states)
        return Micro(program, self.terms, tuple(name_of(home) for home, _ in self.gradients), outputs)

    def _copy(self, node: fx.Node) -> fx.Node:
        """Copy an output that is a tensor that the step may write to, or a view of one."""
        return self.builder.inline(aten.clone.default, self.values[node], name=f"{node.name}_copy")

    def _counts(self) -> dict[fx.Node, fx.Node]:
        return {
            divisor: self.builder.placeholder(
                f"count_{k}", Record(TensorType((), counted_as(self.terms, divisor)), role="input", name=count_name(k))
            )
            for k, divisor in enumerate(self.terms.counts)
        }

    def _state(self, name: str, type: TensorType) -> fx.Node:
        return self.builder.placeholder(name, Record(TensorType(type.shape, type.dtype), role="state", name=name))

    def _begin_backward(self, scale: fx.Node | None) -> None:
        """Add the gradient of the loss: the share of one micro-batch in the mean, times the scale."""
        self.builder.phase, self.builder.about = "backward", record_of(self.loss)
        dtype = type_of(self.tangent).dtype
        if scale is None:
            self.values[self.tangent] = self.builder.inline(
                aten.full.default, [], self.share, dtype=dtype, device=self.builder.device
            )
            return
        tangent = scale if self.share == 1 else self.builder.inline(aten.mul.Scalar, scale, self.share)
        self.values[self.tangent] = (
            tangent if dtype == torch.float32 else self.builder.inline(aten._to_copy.default, tangent, dtype=dtype)
        )


def _is_view_of_placeholder(node: fx.Node) -> bool:
    """Return whether a value is a placeholder, or shares the memory of one."""
    while node.op == "call_function" and (is_getitem(node) or rule_of(node.target).view or returns_alias(node.target)):
        node = operands(node)[0]
    return node.op == "placeholder"
