"""Recompute values of the forward in the backward, instead of keeping them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from autopar.ir.commit import Value
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, map_operands, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType, ValueType
from autopar.passes.manager import Pass
from autopar.plan.recompute import Regions, regions
from autopar.rules.registry import rule_of
from autopar.torch_private import OpOverload, returns_alias


@dataclass(frozen=True)
class Recompute(Pass):
    """Copy forward ops to the backward, before the first op that needs them: activation checkpointing.

    Chen et al., arXiv:1604.06174.

        forward:                                              forward:
          a : f32[8 64] = mm(x, v)                              a : f32[8 64] = mm(x, v)
          h : f32[8 64] = relu(a)                               h : f32[8 64] = relu(a)
          y : f32[8 4] = mm(h, w)                               y : f32[8 4] = mm(h, w)
        backward:                                     →       backward:
          g : f32[8 64] = mm(d_y, w_t)                          g : f32[8 64] = mm(d_y, w_t)
          t : f32[64 8] = t(h)                                  a_again : f32[8 64] = mm(x, v)
                                                                h_again : f32[8 64] = relu(a_again)
                                                                t : f32[64 8] = t(h_again)

    The inputs of a region are kept. Values computed in it are not kept, except returned values and values that are
    read outside of it both in the forward and in the backward, such as the input of the next layer: recomputing those
    would recompute the regions before it, one by one, back to the first. Random ops draw the same numbers again,
    because their seed and stream are the same. An op that reads a state is kept, because the state already has its next
    value in the backward. A forward op whose result only the backward reads is moved there.

    Attributes:
        what: ``"blocks"``: the layers of the model, which are numbered modules that contain modules; one or several
            globs over module paths; or ``"min-cut"``: all values but those that torch's partitioner would keep.
        mesh, constraints: as for ``place``; the constraint of a value also holds for its copy.
    """

    name: ClassVar[str] = "recompute"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "traced"

    what: str | Sequence[str] = "blocks"
    mesh: Mesh | None = None
    constraints: Mapping[str, DistAttr] = field(default_factory=dict)

    def run(self, program: Program) -> list[str]:
        program.mesh = self.mesh or program.mesh
        first = needed(program, regions(program, self.what))
        new: dict[fx.Node, Value] = {}
        moved = unread(program, first)
        with program.edit() as edit:
            for node, before in reversed(first.items()):
                args, kwargs = (
                    map_operands(values, lambda n: new.get(n, n)) for values in (node.args, dict(node.kwargs))
                )
                new[node] = edit.insert(node.target, args, kwargs, before=before, type=self.type(node),
                                        phase=record_of(before).phase, name=f"{node.name}_again", about=node,
                                        uses=record_of(node).uses)  # fmt: skip
            for node, copy in new.items():
                for user in node.users:
                    if record_of(user).phase != "forward":
                        edit.replace_use(user, node, copy)
            for node in moved:
                edit.erase(node)
        saved = [
            n for n in program.nodes if n.op == "call_function" and record_of(n).phase == "forward" and _is_kept(n)
        ]
        return [
            f"{len(new) - len(moved)} ops of the forward run again in the backward, {len(moved)} have moved there; "
            f"{_bytes(first):,} bytes of values are computed again, {_bytes(saved):,} are kept (whole values, views "
            f"counted too)"
        ]

    def type(self, node: fx.Node) -> ValueType:
        """Return the type of a copy: the type of the value, with its constraint."""
        type, attr = record_of(node).type, self.constraints.get(node.name)
        if attr is None or self.mesh is None or not isinstance(type, TensorType):
            return type
        return replace(type, layout=layout_of(self.mesh, attr))


def needed(program: Program, region: Regions) -> dict[fx.Node, fx.Node]:
    """Map each recomputed value to the backward op before which it is computed, last values first.

    It takes one backward walk.
    """
    place = {node: k for k, node in enumerate(program.nodes)}
    pinned = reading_states(program)
    first_readers: dict[fx.Node, fx.Node] = {}
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or record_of(node).phase != "forward":
            continue
        op = node.args[0] if is_getitem(node) else node  # some of several results may be kept, but a copy reads a copy
        own_region = region(op) if region(node) is not None else None
        readers = {
            user: first_readers.get(user, user)
            for user in node.users
            if record_of(user).phase != "forward" or user in first_readers
        }
        if own_region is None or not readers or op in pinned or any(user.op == "output" for user in node.users):
            continue
        others = {user for user in node.users if region(user) != own_region}
        if not any(record_of(user).phase == "forward" for user in others) or others.isdisjoint(readers):
            first_readers[node] = min(readers.values(), key=place.__getitem__)
    return first_readers


def reading_states(program: Program) -> set[fx.Node]:
    """Return the ops that read a state, or a view of one."""
    readers: set[fx.Node] = set()
    views = {node for node in program.placeholders if record_of(node).role == "state"}
    for node in program.nodes if views else ():
        if node.op == "call_function" and not views.isdisjoint(operands(node)):
            readers.add(node)
            if (
                is_getitem(node)
                or returns_alias(node.target)
                or (isinstance(node.target, OpOverload) and rule_of(node.target).view)
            ):
                views.add(node)
    return readers


def unread(program: Program, again: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """Return the forward values that nothing reads when the backward reads the copies."""
    unused: dict[fx.Node, None] = {}
    for node in again:
        if all(user in unused or record_of(user).phase != "forward" for user in node.users):
            unused[node] = None
    return list(unused)


def _is_kept(node: fx.Node) -> bool:
    return any(record_of(user).phase != "forward" for user in node.users)


def _bytes(nodes: Sequence[fx.Node] | Mapping[fx.Node, fx.Node]) -> int:
    types = [record_of(node).type for node in nodes]
    return sum(math.prod(type.shape) * type.dtype.itemsize for type in types if isinstance(type, TensorType))
