"""Make a program of a traced graph: clean the graph, and give every node a record."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.arguments import AtSizes
from autopar.capture.constrained import Constrained
from autopar.capture.graph import drop_unread, forward_first, index_own_rows, merge_views, simplify, sweep, unfake
from autopar.capture.guards import Guards
from autopar.capture.guards.numbers import Number
from autopar.capture.provenance import Origin
from autopar.capture.trace import Tracer
from autopar.capture.unchanged_arguments import changes_nothing, check
from autopar.errors import CaptureError, at_line
from autopar.ir.constant import Constant
from autopar.ir.nodes import is_getitem, node_at, record_of, set_record
from autopar.ir.ops.seeded_random import Draw, Random
from autopar.ir.program import Program
from autopar.ir.record import Record, Result, TensorType, ValueType
from autopar.ir.structure import Structure, unflatten
from autopar.ir.text.tokens import RESERVED, legal_name
from autopar.torch_private import aten, default_generator, rename, storage_of

# -- loops -------------------------------------------------------------------------------------------------------------
#
# Note which loops of the model are unrolled in the program: its size grows with their steps.


MANY = 16  # calls of one module, above which they are steps of a loop and not shared layers


def about_loops(
    program: Program, model: torch.nn.Module, steps: Mapping[str, int], calls: Mapping[str, int]
) -> Iterator[str]:
    """Yield a sentence for each recurrent layer, and for each module that forward calls many times.

    Modules inside of these get no sentence.

    Args:
        steps: path of a recurrent layer → the number of steps of all its calls.
        calls: path of a module → how often it is called.
    """
    looped = [path for path, count in calls.items() if count > MANY]
    outermost = [path for path in looped if not any(_within(path, other) for other in looped if other != path)]
    # a layer inside a loop is part of that loop
    layers = [path for path in steps if not any(_within(path, other) for other in outermost)]
    modules = [record_of(node).module for node in program.nodes]
    for path in (*layers, *(path for path in outermost if path not in layers)):
        module = model.get_submodule(path)
        subject = f"the {type(module).__name__} {path}" if path else f"the model ({type(module).__name__})"
        lines = sum(_within(other, path) for other in modules)
        predicate = f"is unrolled into {steps[path]} steps" if path in layers else f"is called {calls[path]} times"
        yield (
            f"{subject} {predicate}, which make {lines:,} of the program's {len(modules):,} lines; the time to "
            f"capture grows with them"
        )


def _within(path: str, outer: str) -> bool:
    return path == outer or not outer or path.startswith(f"{outer}.")


# -- tree --------------------------------------------------------------------------------------------------------------
#
# Write the structure of returned values as text around the leaves: ``{'loss': ‧, 'logits': ‧}``.


_LEAF = "\0"


def tree_fragments(spec: Structure, constants: Mapping[int, Any]) -> tuple[str, ...]:
    """Return the fragments around the tensor leaves of a structure; constant leaves are part of the fragments.

    ``constants`` maps the position of a leaf to its value.
    """
    return tuple(_write(spec, itertools.count(), constants).split(_LEAF))


def _write(spec: Structure, counter: Iterator[int], constants: Mapping[int, Any]) -> str:
    if spec.kind is None:
        position = next(counter)
        return _text(constants[position]) if position in constants else _LEAF
    inner = [_write(part, counter, constants) for part in spec.parts]
    if spec.kind is tuple:
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if spec.kind is list:
        return f"[{', '.join(inner)}]"
    if spec.kind is dict:
        return "{" + ", ".join(f"{_text(key)}: {text}" for key, text in zip(spec.keys, inner, strict=True)) + "}"
    names = [str(key) for key in spec.keys]
    if not all(name.isidentifier() for name in names):
        names = [f"_{k}" for k in range(len(inner))]
    kind = spec.kind.__name__ if spec.kind.__name__.isidentifier() else legal_name(spec.kind.__name__)
    return f"{kind}({', '.join(f'{name}={text}' for name, text in zip(names, inner, strict=True))})"


def _text(value: Any) -> str:
    """Write a constant as the grammar reads it: a member of an enum as its base value, other objects as strings."""
    base: Any = next((base for base in (bool, int, float, str, type(None)) if isinstance(value, base)), None)
    return repr(str(value)) if base is None else base.__repr__(value)


# -- assemble ----------------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """A traced program, and what is needed to call it like the model.

    Attributes:
        program: level ``traced``; placeholders are parameters, buffers, inputs, tangents, in that order.
        spec: the structure of the model's outputs.
        leaves: the outputs that are not tensors, by position.
        outputs: the number of tensor outputs.
        differentiable: the positions of the tensor outputs that have a tangent.
        device: the device of the call's first tensor that is not on meta.
        notes: what a person should know about this capture.
        draws: the random draws of a single device, by stream; if there are any, the program has a placeholder ``seed``.
        extended: arguments that forward extends and returns, such as a cache: the position of each, and its path in the
            outputs.
        modules: module path → the names of the values that its calls returned, for modules that return one tensor.
        guards: the Python values that forward read.
        numbers: the inputs that a call computes; they follow the inputs that the caller passes.
        constrained: the values that forward constrains.
        at_sizes: captures the call with inputs of other sizes.
        symbolic: the capture with symbols that this one was made of, a ``SymbolicCapture``; ``None`` if it was traced.
        traced: whether this call was traced, and not served by the capture of another size.
        values: symbol → its value.
        loss: the position of the loss, where ``program`` is not the traced one; ``None``: the program tells.
    """

    program: Program
    spec: Structure
    leaves: dict[int, Any]
    outputs: int
    differentiable: tuple[int, ...]
    device: torch.device
    notes: tuple[str, ...]
    modules: dict[str, tuple[str, ...]]
    draws: tuple[Draw, ...] = ()
    extended: tuple[tuple[int, tuple[int, ...]], ...] = ()
    guards: Guards = field(default_factory=lambda: Guards((), ()))
    numbers: tuple[Number, ...] = ()
    constrained: tuple[Constrained, ...] = ()
    at_sizes: AtSizes | None = None
    symbolic: Any = None
    traced: bool = True
    values: Mapping[Any, int] = field(default_factory=dict)
    loss: int | None = None

    def with_tensors(self, tensors: Sequence[Any]) -> Any:
        """Return the model's own output structure around these tensors, with the leaves that are no tensors."""
        rest = iter(tensors)
        leaves = [self.leaves[k] if k in self.leaves else next(rest) for k in range(self.outputs + len(self.leaves))]
        return unflatten(leaves, self.spec)


def assemble(traced: Tracer, random: Random = "parallel") -> Captured:
    """Make the program of a trace; with ``random="single"`` its seed is a table of a single device's generator states.

    Raises:
        CaptureError: the step writes where the caller would see it, or reads a tensor that is neither an argument nor
            part of the model.
    """
    return _GraphBuilder(traced).run(random)


class _GraphBuilder:
    def __init__(self, traced: Tracer) -> None:
        self.traced = traced
        self.origins = traced.recorder.origins

    def run(self, random: Random) -> Captured:
        traced = self.traced
        graph = traced.module.graph
        settled = traced.settled()
        drop_unread(graph, self.origins)
        index_own_rows(graph, self.origins)
        replaced = settled | simplify(graph) | merge_views(graph, self.origins)
        *placeholders, seed = graph.find_nodes(op="placeholder")
        names = [*traced.parameters, *traced.buffers, *traced.arguments.names]
        roles = (
            ["param"] * len(traced.parameters)
            + ["buffer"] * len(traced.buffers)
            + ["input"] * len(traced.arguments.names)
        )
        output = next(iter(reversed(graph.nodes)))
        flat = list(output.args[0])
        first = traced.returned + len(traced.differentiated)
        returned, gradients, reassigned = flat[: traced.returned], flat[traced.returned : first], flat[first:]
        program = Program(graph, "traced", tree=())
        for k, node in enumerate(placeholders[: len(names)]):
            self._introduce(node, names[k], roles[k])
        outputs = self._without_idle_writes(graph, placeholders, returned)
        paths = [k for k in range(len(traced.leaves) + len(outputs)) if k not in traced.leaves]
        program.tree = tree_fragments(traced.spec, traced.leaves)
        labels = _output_names(traced.spec, paths)
        for node, k in zip(placeholders[len(names) :], traced.differentiable, strict=True):
            self._introduce(node, f"d_{labels[k]}", "tangent", k)
        if traced.draws:
            self._introduce_seed(seed, random)
        else:
            graph.erase_node(seed)
        results = [Result("return") for _ in outputs]
        values = list(outputs)
        for k, gradient in zip(traced.differentiated, gradients, strict=True):
            if gradient is not None:
                results.append(Result("grad", placeholders[k].name))
                values.append(gradient)
        buffers = dict(zip(traced.buffers, placeholders[len(traced.parameters) :], strict=False))
        reassigned_values = {buffers[name]: value for name, value in zip(traced.reassigned, reassigned, strict=True)}
        for node, value in self._states(graph, placeholders, reassigned_values):
            results.append(Result("state", node.name))
            values.append(value)
        output.args = (tuple(values),)
        set_record(output, Record(None, results=tuple(results)))
        sweep(graph)
        for node in graph.nodes:
            if node.op in ("call_function", "get_attr"):
                self._describe(program, node)
        traced.name_sizes(graph)
        unfake(graph)
        forward_first(graph, results, values)
        graph.owning_module = None
        modules, constrained = self._modules(graph, replaced), self._constrained(graph, replaced)
        notes = (*traced.notes(), *about_loops(program, traced.model, traced.unroller.steps, traced.calls))
        return Captured(program, traced.spec, traced.leaves, len(outputs), traced.differentiable, traced.device,
                        notes, modules, traced.draws, tuple(traced.extended), traced.guards,
                        constrained=constrained)  # fmt: skip

    def _modules(self, graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> dict[str, tuple[str, ...]]:
        """Map each module path to the values that its calls returned and that the program still has."""
        alive = set(graph.nodes)
        returned_names: dict[str, tuple[str, ...]] = {}
        for path, nodes in self.traced.recorder.returned.items():
            for node in nodes:
                while node in replaced:
                    node = replaced[node]
                if node in alive:
                    returned_names[path] = (*returned_names.get(path, ()), node.name)
        return returned_names

    def _constrained(self, graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> tuple[Constrained, ...]:
        """Return the values that forward constrains and that the program still has."""
        alive, found = set(graph.nodes), []
        for node, spec, source, axis in self.traced.recorder.constrained:
            while node in replaced:
                node = replaced[node]
            if node in alive:
                found.append(Constrained(node.name, spec, source, axis))
        return tuple(found)

    def _without_idle_writes(
        self, graph: fx.Graph, placeholders: Sequence[fx.Node], returned: Sequence[fx.Node]
    ) -> list[fx.Node]:
        """Leave out the writes into arguments that change nothing in this call; the returned values check them."""
        traced, checked = self.traced, list(returned)
        tensors = [*traced.buffers.values(), *traced.arguments.tensors]
        real = dict(zip(placeholders[len(traced.parameters) :], tensors, strict=False))
        for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
            target, value = node.args[:2]
            if target not in real or record_of(target).role != "input" or not changes_nothing(value, target, real):
                continue
            origin = traced.recorder.written.get(placeholders.index(target)) or Origin()
            check(graph, value, target, checked, f"{self._refused_write(target, origin)}", traced.mode)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        return checked

    def _states(
        self, graph: fx.Graph, placeholders: Sequence[fx.Node], reassigned: Mapping[fx.Node, fx.Node]
    ) -> list[tuple[fx.Node, fx.Node]]:
        """Return the buffers that the step writes, with their next values; they become state.

        All other writes are refused.
        """
        next_values: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node.target is not aten.copy_.default:
                continue
            target, value = node.args[:2]
            if target not in placeholders or record_of(target).role != "buffer":
                where = placeholders.index(target) if target in placeholders else -1
                origin = self.traced.recorder.written.get(where) or self.origins.get(value, Origin())
                raise self._refused_write(target, origin)
            next_values[target] = value
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        next_values |= reassigned
        buffers = self.traced.buffers
        storages = collections.Counter(storage_of(t) for t in [*self.traced.parameters.values(), *buffers.values()])
        for node in next_values:
            record = record_of(node)
            name = record.name or node.name
            if storages[storage_of(buffers[name])] > 1:
                raise CaptureError(
                    f"the step writes the buffer {name}, which shares its memory with another parameter or buffer\n"
                    f"  give each its own memory, with clone()"
                )
            set_record(node, record._replace(role="state"))
        return [(node, next_values[node]) for node in placeholders if node in next_values]

    def _refused_write(self, target: fx.Node, origin: Origin) -> CaptureError:
        record = record_of(target) if target.op == "placeholder" else None
        kind = {"param": "the parameter", "input": "its argument"}.get(record.role if record else "", "the tensor")
        remedy = {
            "param": "write it outside of the step, as an optimizer does",
            "input": "write out of place (x = x + 1 instead of x += 1)",
        }.get(record.role if record else "", "make it a buffer of the module")
        return CaptureError(
            f"the step writes into {kind} {record.name if record and record.name else target}, which the caller would "
            f"see changed\n"
            f"{at_line(origin.source, origin.module)}\n"
            f"  {remedy}"
        )

    def _introduce(self, node: fx.Node, name: str, role: str, index: int | None = None) -> None:
        identifier = name.replace(".", "_")
        identifier = "".join(c if c.isalnum() or c == "_" else "_" for c in identifier) or role
        rename(node, identifier + "_" * (identifier in RESERVED))
        node.target = node.name
        set_record(
            node,
            Record(
                self._type(node), role=role, index=index, name="" if role == "tangent" or name == node.name else name
            ),
        )

    def _introduce_seed(self, node: fx.Node, random: Random) -> None:
        self._introduce(node, "seed", "seed")
        if random == "single":
            shape = (len(self.traced.draws), default_generator(self.traced.device).get_state().numel())
            set_record(node, record_of(node)._replace(type=TensorType(shape, torch.uint8)))

    def _type(self, node: fx.Node) -> ValueType:
        def type_of(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return TensorType(tuple(map(self.traced.size, value.shape)), value.dtype)
            if isinstance(value, (tuple, list)):
                return tuple(type_of(v) for v in value)
            return None

        return type_of(node.meta.get("val"))

    def _describe(self, program: Program, node: fx.Node) -> None:
        origin = self.origins.get(node)
        if origin is None and is_getitem(node):
            origin = self.origins.get(node_at(node))
        origin = origin or Origin()
        if node.op == "get_attr":
            tensor = getattr(self.traced.module, str(node.target))
            if tensor.requires_grad and self.traced.grad:
                user = next((self.origins[u] for u in node.users if u in self.origins), origin)
                raise CaptureError(
                    f"forward reads a tensor that requires gradients and is neither a parameter nor an argument\n"
                    f"{at_line(user.source, user.module)}\n"
                    f"  register it (torch.nn.Parameter, ParameterList), pass it in, or detach() it"
                )
            program.constants[node.name] = Constant.of(tensor)
            node.target = node.name
        set_record(
            node,
            Record(self._type(node), phase=origin.phase, module=origin.module, source=origin.source, call=origin.call),
        )


def _output_names(spec: Structure, leaves: Sequence[int]) -> list[str]:
    names = [
        "_".join("".join(c if c.isalnum() else "_" for c in key) for key in path) or "out" for path in spec.paths()
    ]
    return [names[k] for k in leaves]
