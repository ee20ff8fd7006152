"""Expand an op that needs a split dim whole into ops that do not need it whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.capture.decompose.expansions import EXPANSIONS
from autopar.capture.decompose.subgraph import Ref, subgraph
from autopar.ir.commit import Value
from autopar.ir.edit import Edit
from autopar.ir.layout import DistAttr, Layout, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import element_of, map_operands, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.passes.manager import LayoutPass
from autopar.rules.binding import typed

ARANGE = torch.ops.aten.arange.default


@dataclass(frozen=True)
class Expand(LayoutPass):
    """Write softmax, cross-entropy, look-ups and causal attention with ops that can be split, where their dim is split.

        table : f32[100/tp 64] = param                         table : f32[100/tp 64] = param
        y : f32[4 64] = embedding(table, ids)             →    places : i64[100] = arange(100)
                                                               y : f32[4 64] = autopar::look_up(table, ids, places, 100)

    A trial layout propagation, in which such ops may be split, finds these ops. Its Layouts are not kept.

    Attributes:
        mesh, constraints, strict, whole: as in ``LayoutPass``.
        device: the device of tensors that ops create; ``None``: the CPU.
    """

    name: ClassVar[str] = "expand"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "traced"

    device: torch.device | None = None

    def run(self, program: Program) -> list[str]:
        mesh = self._put_on_mesh(program)
        if not any(node.target in EXPANSIONS for node in program.nodes):
            return []
        trial = self._propagation(program, mesh, expanding=True)
        if trial.split:
            new: dict[fx.Node, Value] = {}
            places: dict[tuple[Any, ...], Value] = {}
            with program.edit() as edit:
                for node in list(program.nodes):  # in order, so that what is shared comes before all its readers
                    if (dim := trial.split.get(node)) is not None:
                        self.expand(edit, node, layout_of(mesh, DistAttr((dim,))), new, places)
        return []

    def expand(
        self,
        edit: Edit,
        node: fx.Node,
        split: Layout,
        new: dict[fx.Node, Value],
        places: dict[tuple[Any, ...], Value] | None = None,
    ) -> None:
        """Put an op's expansion in its place.

        Args:
            split: the Layout of the tensor that numbers the indices along the dim. The ops that read it know which
                indices a rank has.
            new: old value → its replacement, which keeps the constraint of the old value.
            places: what numbers the indices of a dim, by its size, Layout and phase; ops of one phase share it.
        """
        places = {} if places is None else places
        required = iter(record_of(node).uses or [None] * len(operands(node)))  # dtypes of mixed precision
        args, kwargs = (
            map_operands(values, lambda operand: _required(typed(operand), next(required)))
            for values in (node.args, dict(node.kwargs))
        )
        args, kwargs = [typed(a) for a in args], {key: typed(value) for key, value in kwargs.items()}
        expansion = subgraph(EXPANSIONS[node.target].function, args, kwargs, self.device or torch.device("cpu"))
        inputs = [new.get(operand, operand) for operand in operands(node)]
        needs = record_of(node).uses or (None,) * len(inputs)
        results: list[Value] = []

        def value(ref: Ref) -> Value:
            if ref.step < 0:
                return inputs[-ref.step - 1]
            if ref.part is None:
                return results[ref.step]
            types = expansion.steps[ref.step].type
            assert isinstance(types, tuple)
            return edit.insert(
                operator.getitem, (results[ref.step], ref.part), before=node, type=types[ref.part], about=node
            )

        for k, step in enumerate(expansion.steps):
            type = step.type
            if step.target is ARANGE:
                assert isinstance(type, TensorType)
                type = replace(type, layout=split)
                numbered = (repr((step.args, dict(step.kwargs))), type, record_of(node).phase)
                if numbered in places:
                    results.append(places[numbered])
                    continue
            if expansion.results == (Ref(k),) and (layout := self.layout(node, split.mesh)) is not None:
                assert isinstance(type, TensorType)
                type = replace(type, layout=layout)
            read = _refs((step.args, dict(step.kwargs)))
            uses = [needs[-ref.step - 1] if ref.step < 0 else None for ref in read]
            results.append(edit.insert(step.target, _filled(step.args, value), _filled(dict(step.kwargs), value),
                                       before=node, type=type, about=node, uses=uses if any(uses) else ()))  # fmt: skip
            if step.target is ARANGE:
                places[numbered] = results[-1]
        parts = (
            {0: node}
            if len(expansion.results) == 1 and not is_tuple(node)
            else {element_of(user)[1]: user for user in node.users}
        )
        for part, old in parts.items():
            ref = expansion.results[part]
            assert ref is not None
            new[old] = value(ref)
            edit.replace_all_uses(old, new[old])
        for old in dict.fromkeys([*parts.values(), node]):
            edit.erase(old)

    def layout(self, node: fx.Node, mesh: Mesh) -> Layout | None:
        type = record_of(node).type
        layout = type.layout if isinstance(type, TensorType) else None
        attr = self.constraints.get(node.name)
        return layout if attr is None else layout_of(mesh, attr)


def is_tuple(node: fx.Node) -> bool:
    return isinstance(record_of(node).type, tuple)


def _required(type: Any, need: Requirement | None) -> Any:
    return type if need is None else replace(type, dtype=need.dtype)


def _refs(value: Any) -> list[Ref]:
    """Return the references among arguments, in order."""
    refs: list[Ref] = []
    _filled(value, refs.append)
    return refs


def _filled(value: Any, of: Callable[[Ref], object]) -> Any:
    """Return arguments with each reference replaced by its value."""
    if isinstance(value, Ref):
        return of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(member, of) for member in value)
    if isinstance(value, dict):
        return {key: _filled(member, of) for key, member in value.items()}
    return value
