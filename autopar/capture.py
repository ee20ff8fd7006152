"""Capture: the model's step, forward and backward, as one static graph of functional ATen ops.

One ``make_fx`` trace under fake tensors. Every argument is a fake tensor of its own, so that the same tensor passed
twice stays two inputs; tied parameters are the only aliases kept. A second trace functionalizes, only where an op that
writes in place appears. The joint graph holds both phases.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.arguments import Arguments, bind_arguments
from autopar.borrow import ONE_AT_A_TIME, Borrower
from autopar.decompositions import DECOMPOSITIONS, IDENTITIES, SYNONYMS, TRANSPOSE, VIEWS
from autopar.errors import CaptureError
from autopar.program import Constant, Program, is_getitem, record_of, set_record
from autopar.provenance import Origin, Recorder, Replay
from autopar.record import Record, Result, TensorType, ValueType
from autopar.structure import Structure, flatten, holds, is_cache, unflatten
from autopar.text.parser import RESERVED
from autopar.text.tree import tree_fragments
from autopar.torch_private import (
    DATA_DEPENDENT,
    FakeTensorMode,
    draws_random,
    make_fx,
    mutates,
    rename,
    single_threaded_backward,
    storage_of,
)


@dataclass
class Captured:
    """A traced program and what is needed to call it like the model.

    Attributes:
        program: level ``traced``; placeholders are parameters, buffers, inputs, tangents, in that order.
        spec: the structure of the model's outputs; ``leaves`` are those that are no tensors.
        outputs: how many tensor outputs there are; ``differentiable`` are the positions that have a tangent.
        device: of the first tensor of the call that is not on meta.
        notes: what a person should know of this capture.
        modules: module path → the names of the values that its calls returned, of modules that return one tensor.
    """

    program: Program
    spec: Structure
    leaves: dict[int, Any]
    outputs: int
    differentiable: tuple[int, ...]
    device: torch.device
    notes: tuple[str, ...]
    modules: dict[str, tuple[str, ...]]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Captured:
    """Trace ``model(*args, **kwargs)`` and its backward.

    Outputs that require gradients get one tangent each. Under ``torch.no_grad()`` there is no backward. The model and
    the arguments are only read: whatever forward does to the model is undone. One capture runs at a time.

    Raises:
        CaptureError: control flow on the values of tensors, random ops, an argument that cannot be flattened, a tensor
            that forward writes or keeps where it cannot be followed.
    """
    with ONE_AT_A_TIME:
        return _Capture(model, bind_arguments(model, args, kwargs or {})).run()


class _Capture:
    def __init__(self, model: torch.nn.Module, arguments: Arguments) -> None:
        self.model = model
        self.arguments = arguments
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.recorder = Recorder(model)
        self.borrower = Borrower(model)
        self.grad = torch.is_grad_enabled()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self) -> Captured:
        given = [*self.parameters.values(), *self.buffers.values(), *self.arguments.tensors]
        self.device = _device(given)
        fakes = [self._fake(t) for t in given]
        tangents = self._probe(fakes)
        graph = self._trace(fakes, tangents)
        if any(mutates(node.target) for node in graph.graph.nodes):
            graph = self._functionalize(graph, [*fakes, *tangents])
        return self._captured(graph, len(fakes))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self.device if tensor.is_meta else tensor.device
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad and self.grad)

    @contextlib.contextmanager
    def _lent(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """The model on stand-ins, over the backward too: what it recomputes reads them again."""
        own = [*self.parameters.values(), *self.buffers.values()]
        with self.borrower.borrowed(dict(zip(own, tensors, strict=False))), self._explained(), self.recorder.modules():
            yield

    def _written(self) -> list[torch.Tensor]:
        """The tensors that forward put in the place of buffers, when the model has been given back."""
        taken = self.borrower.reassigned
        self.reassigned = [name for name, buffer in self.buffers.items() if buffer in taken]
        return [taken[self.buffers[name]] for name in self.reassigned]

    def _call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the lent model returns; remembers how they are arranged."""
        rest = iter(tensors[len(self.parameters) + len(self.buffers) :])
        flat = [next(rest) if isinstance(v, torch.Tensor) else v for v in self.arguments.flat]
        args, kwargs = unflatten(flat, self.arguments.spec)
        before = [(value, flatten(value)) for value in (*args, *kwargs.values())]
        outputs = self.model(*args, **kwargs)
        self._refuse_changed(before, outputs)
        leaves, self.spec = flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__}, which capture cannot look into; return tensors, numbers or "
                    f"containers and dataclasses of them"
                )
        self.leaves = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.returned = len(tensors)
        return tensors

    def _refuse_changed(self, before: Sequence[tuple[Any, tuple[list[Any], Structure]]], outputs: Any) -> None:
        """Arguments that forward gives other contents: a cache that it returns too is a new one there, others are refused."""
        self.extended: list[str] = []
        for name, (value, (leaves, spec)) in zip(self.arguments.passed, before, strict=True):
            now, arranged = flatten(value)
            if arranged == spec and all(a is b for a, b in zip(now, leaves, strict=True)):
                continue
            what = f"{name}, a {type(value).__name__}"
            if not is_cache(value):
                raise CaptureError(f"forward changes its argument {what}, which the caller would see changed\n  change a copy of it")
            if not holds(outputs, value):
                raise CaptureError(f"forward changes its argument {what}, and does not return it\n  return it: what is passed in stays as it was")
            self.extended.append(what)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Control flow on values is refused, also where the model itself has caught the error."""
        try:
            with self.recorder:
                yield
        except DATA_DEPENDENT as error:
            self.recorder.dependent = self.recorder.dependent or (self.recorder.current, error)
        if self.recorder.refused is not None:
            raise self.recorder.refused
        if self.recorder.dependent is not None:
            origin, cause = self.recorder.dependent
            raise CaptureError(
                f"the step depends on the values of its tensors, so it is not one static graph\n"
                f"    {origin.source or 'unknown line'}\n"
                f"  it reads them with {str(cause).splitlines()[0]} (.item(), bool(), nonzero and the like)\n"
                f"  keep the choice inside the graph with torch.where, or move it out of forward"
            ) from cause

    def _probe(self, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One forward on fakes, to learn which outputs have a tangent, and of what shape."""
        with self.mode, self._lent(fakes):
            outputs = self._call(fakes)
        self.differentiable = tuple(k for k, o in enumerate(outputs) if self.grad and o.requires_grad)
        like = [outputs[k] for k in self.differentiable]
        with self.mode:  # contiguous, as those that the runtime cuts
            return [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in like]

    def _trace(self, fakes: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> fx.GraphModule:
        self.differentiated = [k for k, t in enumerate(fakes) if t.requires_grad] if tangents else []

        def joint(fakes: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
            gradients: Sequence[torch.Tensor | None] = ()
            with self._lent(fakes):
                outputs = self._call(fakes)
                if tangents:
                    self.recorder.phase = "backward"
                    wanted = [fakes[k] for k in self.differentiated]
                    differentiable = [outputs[k] for k in self.differentiable]
                    with single_threaded_backward():
                        gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True)
            return [*outputs, *gradients, *self._written()]

        with self.mode:
            return make_fx(joint, decomposition_table=DECOMPOSITIONS)(list(fakes), list(tangents))

    def _functionalize(self, graph: fx.GraphModule, fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
        """Trace the captured graph again, without its writes; a write into an argument stays, as one ``copy_``."""
        graph.graph.set_codegen(fx.graph.CodeGen())
        returned = self.recorder.returned
        self.recorder = replay = Replay(self.model, graph, self.recorder.origins)
        detached = [fake.detach() for fake in fakes]
        with self.mode, torch.no_grad():
            replayed = torch.func.functionalize(replay.run, remove="mutations")
            again = make_fx(replayed, decomposition_table=DECOMPOSITIONS)(*detached)
        replay.follow(returned)
        return again

    # -- the program ---------------------------------------------------------------------------------------------

    def _captured(self, module: fx.GraphModule, given: int) -> Captured:
        graph = module.graph
        replaced = _simplify(graph) | self._merge_views(graph)
        placeholders = list(graph.find_nodes(op="placeholder"))
        names = [*self.parameters, *self.buffers, *self.arguments.names]
        roles = ["param"] * len(self.parameters) + ["buffer"] * len(self.buffers) + ["input"] * len(self.arguments.names)
        output = next(iter(reversed(graph.nodes)))
        flat = list(output.args[0])  # type: ignore[arg-type]
        first = self.returned + len(self.differentiated)
        returned, gradients, reassigned = flat[: self.returned], flat[self.returned : first], flat[first:]
        program = Program(graph, "traced", tree=())
        for k, node in enumerate(placeholders[:given]):
            self._introduce(node, names[k], roles[k])
        outputs = [node for node in returned]
        paths = [k for k in range(len(self.leaves) + len(outputs)) if k not in self.leaves]
        program.tree = tree_fragments(self.spec, self.leaves)
        labels = _output_names(self.spec, paths)
        for node, k in zip(placeholders[given:], self.differentiable, strict=True):
            self._introduce(node, f"d_{labels[k]}", "tangent", k)
        results = [Result("return") for _ in outputs]
        values = list(outputs)
        for k, gradient in zip(self.differentiated, gradients, strict=True):
            if gradient is not None:
                results.append(Result("grad", placeholders[k].name))
                values.append(gradient)
        buffers = dict(zip(self.buffers, placeholders[len(self.parameters) :], strict=False))
        taken = {buffers[name]: value for name, value in zip(self.reassigned, reassigned, strict=True)}
        for node, value in self._states(graph, placeholders, taken):
            results.append(Result("state", node.name))
            values.append(value)
        output.args = (tuple(values),)
        set_record(output, Record(None, results=tuple(results)))
        _sweep(graph)
        for node in graph.nodes:
            if node.op in ("call_function", "get_attr"):
                self._describe(program, module, node)
        _unfake(graph)
        _forward_first(graph, results, values)
        graph.owning_module = None
        self._refuse(program)
        modules = self._modules(graph, replaced)
        return Captured(program, self.spec, self.leaves, len(outputs), self.differentiable, self.device, self._notes(), modules)

    def _modules(self, graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> dict[str, tuple[str, ...]]:
        """Module path → the values that its calls returned, as far as the program still has them."""
        alive = set(graph.nodes)
        found: dict[str, tuple[str, ...]] = {}
        for path, nodes in self.recorder.returned.items():
            for node in nodes:
                while node in replaced:
                    node = replaced[node]
                if node in alive:
                    found[path] = (*found.get(path, ()), node.name)
        return found

    def _merge_views(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """A view that was made before, in the same phase, is that one: what it needs later, it needs once."""
        first: dict[Any, fx.Node] = {}
        replaced: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target in VIEWS and not node.kwargs:
                phase = self.recorder.origins.get(node, Origin()).phase
                twin = first.setdefault((node.target, repr(node.args), phase), node)
                if twin is not node:
                    node.replace_all_uses_with(twin)
                    replaced[node] = twin
        return replaced

    def _notes(self) -> tuple[str, ...]:
        found = [f"forward changes its argument {what}: the one returned is new, the one passed in stays as it was" for what in self.extended]
        if self.borrower.changed:
            names = ", ".join(self.borrower.changed)
            found.append(f"forward changes {names}; the captured step keeps the values of the first call")
        return tuple(found)

    def _states(
        self, graph: fx.Graph, placeholders: Sequence[fx.Node], reassigned: Mapping[fx.Node, fx.Node]
    ) -> list[tuple[fx.Node, fx.Node]]:
        """Buffers that the step writes, with their next values: they become state. Other writes are refused."""
        found: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node.target is not torch.ops.aten.copy_.default:
                continue
            target, value = node.args[:2]
            if target not in placeholders or record_of(target).role != "buffer":  # type: ignore[arg-type]
                raise self._written_wrongly(target, value)  # type: ignore[arg-type]
            found[target] = value  # type: ignore[index,assignment]
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        found |= reassigned
        storages = collections.Counter(storage_of(t) for t in [*self.parameters.values(), *self.buffers.values()])
        for node in found:
            record = record_of(node)
            name = record.name or node.name
            if storages[storage_of(self.buffers[name])] > 1:
                raise CaptureError(
                    f"the step writes the buffer {name}, which shares its memory with another parameter or buffer\n"
                    f"  give each its own memory, with clone()"
                )
            set_record(node, replace(record, role="state"))
        return [(node, found[node]) for node in placeholders if node in found]

    def _written_wrongly(self, target: fx.Node, value: fx.Node) -> CaptureError:
        origin = self.recorder.origins.get(value, Origin())
        record = record_of(target) if target.op == "placeholder" else None
        what = {"param": "the parameter", "input": "its argument"}.get(record.role if record else "", "the tensor")
        remedy = {
            "param": "write it outside of the step, as an optimizer does",
            "input": "write out of place (x = x + 1 instead of x += 1)",
        }.get(record.role if record else "", "make it a buffer of the module")
        return CaptureError(
            f"the step writes into {what} {record.name if record and record.name else target}, which the caller would see changed\n"
            f"    {origin.source}   in module {origin.module or 'the root'}\n"
            f"  {remedy}"
        )

    def _introduce(self, node: fx.Node, name: str, role: str, index: int | None = None) -> None:
        wanted = name.replace(".", "_")
        wanted = "".join(c if c.isalnum() or c == "_" else "_" for c in wanted) or role
        rename(node, wanted + "_" * (wanted in RESERVED))
        node.target = node.name
        set_record(node, Record(_type(node), role=role, index=index, name="" if role == "tangent" or name == node.name else name))

    def _describe(self, program: Program, module: fx.GraphModule, node: fx.Node) -> None:
        origin = self.recorder.origins.get(node)
        if origin is None and is_getitem(node):
            origin = self.recorder.origins.get(node.args[0])  # type: ignore[arg-type]
        origin = origin or Origin()
        if node.op == "get_attr":
            tensor = getattr(module, str(node.target))
            if tensor.requires_grad and self.grad:
                user = next((self.recorder.origins[u] for u in node.users if u in self.recorder.origins), origin)
                raise CaptureError(
                    f"forward reads a tensor that requires gradients and is neither a parameter nor an argument\n"
                    f"    {user.source}   in module {user.module or 'the root'}\n"
                    f"  register it (torch.nn.Parameter, ParameterList), pass it in, or detach() it"
                )
            program.constants[node.name] = Constant.of(tensor)
            node.target = node.name
        set_record(node, Record(_type(node), phase=origin.phase, module=origin.module, source=origin.source))

    def _refuse(self, program: Program) -> None:
        for node in program.nodes:
            if draws_random(node.target, node.args):
                name = getattr(node.target, "__name__", "")
                origin = self.recorder.origins.get(node, Origin())
                raise CaptureError(
                    f"{name} draws random numbers, which have no sharding rule yet\n"
                    f"    {origin.source}   in module {origin.module or 'the root'}\n"
                    f"  set the dropout probability to 0, call model.eval(), or pass the random tensor in"
                )


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """That of the first tensor that has values. On meta alone: the accelerator, or CPU, so that the ops are those of a run."""
    real = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    return real or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _type(node: fx.Node) -> ValueType:
    def one(value: Any) -> ValueType:
        if isinstance(value, torch.Tensor):
            return TensorType(tuple(int(n) for n in value.shape), value.dtype)
        if isinstance(value, (tuple, list)):
            return tuple(one(v) for v in value)  # type: ignore[misc]
        return None

    return one(node.meta.get("val"))


def _simplify(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Identities go, synonyms get one name, a transpose of a transpose is the value itself, a constant is read once.

    Returns what takes the place of the nodes that go.
    """
    constants: dict[str, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            replaced[node] = constants.setdefault(node.target, node)
        elif node.target in IDENTITIES and node.op == "call_function":
            replaced[node] = node.args[0]
        elif node.target in SYNONYMS:
            node.target = SYNONYMS[node.target]
            rename(node, node.target.__name__.partition(".")[0])
        elif node.target is TRANSPOSE and node.args[0].target is TRANSPOSE:  # type: ignore[union-attr]
            replaced[node] = node.args[0].args[0]  # type: ignore[union-attr]
        if node in replaced:
            node.replace_all_uses_with(replaced[node])
    return {old: new for old, new in replaced.items() if old is not new}


def _sweep(graph: fx.Graph) -> None:
    """Erase what nothing reads; every op is functional."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _forward_first(graph: fx.Graph, results: Sequence[Result], values: Sequence[fx.Node]) -> None:
    """What returned values and states are made of comes before the backward: functionalizing may make views late."""
    needed: set[fx.Node] = set()
    open_ = [value for value, result in zip(values, results, strict=True) if result.kind != "grad"]
    while open_:
        node = open_.pop()
        if node.op in ("call_function", "get_attr") and node not in needed:
            needed.add(node)
            open_ += node.all_input_nodes
    first: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        record = record_of(node)
        if node in needed or record.phase == "forward":
            set_record(node, replace(record, phase="forward"))
            if first is not None:
                first.prepend(node)
        else:
            first = first or node


def _unfake(graph: fx.Graph) -> None:
    """Fake tensors are made again when a consumer of torch's wants them; they hold memory and modes."""
    for node in graph.nodes:
        for key in list(node.meta):
            if key != "autopar":
                del node.meta[key]


def _output_names(spec: Structure, leaves: Sequence[int]) -> list[str]:
    names = ["_".join("".join(c if c.isalnum() else "_" for c in key) for key in path) or "out" for path in spec.paths()]
    return [names[k] for k in leaves]
