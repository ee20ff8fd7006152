"""Capture: the model's step, forward and backward, as one static graph of functional ATen ops.

One ``make_fx`` trace under fake tensors. Every argument is a fake tensor of its own, so that the same tensor passed
twice stays two inputs; tied parameters are the only aliases kept. A second trace functionalizes, only where an op that
writes in place appears. The joint graph holds both phases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.arguments import Arguments, bind_arguments
from autopar.decompositions import DECOMPOSITIONS, IDENTITIES, SYNONYMS, TRANSPOSE
from autopar.errors import CaptureError
from autopar.program import Constant, Program, is_getitem, record_of, set_record
from autopar.provenance import Origin, Recorder, Replay
from autopar.record import Record, Result, TensorType, ValueType
from autopar.text.parser import RESERVED
from autopar.text.tree import tree_fragments
from autopar.torch_private import (
    DATA_DEPENDENT,
    FakeTensorMode,
    make_fx,
    mutates,
    pytree,
    rename,
    single_threaded_backward,
)

RANDOM = ("bernoulli", "dropout", "rand", "normal", "multinomial", "poisson", "exponential", "uniform")


@dataclass
class Captured:
    """A traced program and what is needed to call it like the model.

    Attributes:
        program: level ``traced``; placeholders are parameters, buffers, inputs, tangents, in that order.
        parameters, buffers: the user's names, in the order of the placeholders.
        inputs: names of the tensor inputs.
        spec: the structure of the model's outputs (a pytree spec); ``leaves`` are those that are no tensors.
        outputs: how many tensor outputs there are; ``differentiable`` are the positions that have a tangent.
        gradients: names of placeholders with a gradient, in the order of the ``grad`` results.
        call: the arguments as fake tensors, to capture the same call again.
    """

    program: Program
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    spec: Any
    leaves: dict[int, Any]
    outputs: int
    differentiable: tuple[int, ...]
    gradients: tuple[str, ...]
    call: tuple[tuple[Any, ...], dict[str, Any]]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    given: frozenset[int] | None = None,
) -> Captured:
    """Trace ``model(*args, **kwargs)`` and its backward.

    Outputs that require gradients get one tangent each; with ``given``, positions of tensor outputs, only those do.
    Under ``torch.no_grad()`` there is no backward. The model and the arguments are only read.

    Raises:
        CaptureError: control flow on the values of tensors, random ops, an argument that cannot be flattened.
    """
    arguments = bind_arguments(model, args, kwargs or {})
    return _Capture(model, arguments, given).run()


class _Capture:
    def __init__(self, model: torch.nn.Module, arguments: Arguments, given: frozenset[int] | None) -> None:
        self.model = model
        self.given = given
        self.arguments = arguments
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.recorder = Recorder(model)
        self.grad = torch.is_grad_enabled()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self) -> Captured:
        given = [*self.parameters.values(), *self.buffers.values(), *self.arguments.tensors]
        fakes = [self._fake(t) for t in given]
        tangents = self._probe(fakes)
        graph = self._trace(fakes, tangents)
        if any(mutates(node.target) for node in graph.graph.nodes):
            graph = self._functionalize(graph, [*fakes, *tangents])
        stand_ins = iter(fakes[len(self.parameters) + len(self.buffers) :])
        flat = [next(stand_ins) if isinstance(v, torch.Tensor) else v for v in self.arguments.flat]
        return self._captured(graph, len(fakes), pytree.tree_unflatten(flat, self.arguments.spec))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return fake.requires_grad_(tensor.requires_grad and self.grad)

    def _call(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run the model on stand-ins; returns the flat outputs and remembers their structure."""
        names = [*self.parameters, *self.buffers]
        state = dict(zip(names, tensors, strict=False))
        rest = iter(tensors[len(names) :])
        flat = [next(rest) if isinstance(v, torch.Tensor) else v for v in self.arguments.flat]
        args, kwargs = pytree.tree_unflatten(flat, self.arguments.spec)
        with self._explained(), self.recorder.modules():
            outputs = torch.func.functional_call(self.model, state, args, kwargs)
        leaves, self.spec = pytree.tree_flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__}, which capture cannot look into; return tensors, numbers or "
                    f"containers of them (torch.utils._pytree.register_pytree_node makes a class one)"
                )
        self.leaves = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.returned = len(tensors)
        return tensors

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            with self.recorder:
                yield
        except DATA_DEPENDENT as error:
            where = f"{self.recorder.current.source}" or "unknown line"
            raise CaptureError(
                f"the step depends on the values of its tensors, so it is not one static graph\n"
                f"    {where}\n"
                f"  {str(error).splitlines()[0]}\n"
                f"  keep the choice inside the graph with torch.where, or move it out of forward"
            ) from error

    def _probe(self, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One forward on fakes, to learn which outputs have a tangent, and of what shape."""
        with self.mode:
            outputs = self._call(fakes)
        able = [k for k, o in enumerate(outputs) if self.grad and o.requires_grad]
        self.differentiable = tuple(k for k in able if self.given is None or k in self.given)
        with self.mode:
            return [torch.empty_like(outputs[k].detach()) for k in self.differentiable]

    def _trace(self, fakes: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> fx.GraphModule:
        self.differentiated = [k for k, t in enumerate(fakes) if t.requires_grad] if tangents else []

        def joint(fakes: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
            outputs = self._call(fakes)
            if not tangents:
                return outputs
            self.recorder.phase = "backward"
            wanted = [fakes[k] for k in self.differentiated]
            with self._explained(), single_threaded_backward():
                gradients = torch.autograd.grad(
                    [outputs[k] for k in self.differentiable], wanted, tangents, allow_unused=True
                )
            return [*outputs, *gradients]

        with self.mode:
            return make_fx(joint, decomposition_table=DECOMPOSITIONS)(list(fakes), list(tangents))

    def _functionalize(self, graph: fx.GraphModule, fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
        """Trace the captured graph again, without its writes; a write into an argument stays, as one ``copy_``."""
        graph.graph.set_codegen(fx.graph.CodeGen())
        self.recorder = replay = Replay(self.model, graph, self.recorder.origins)
        detached = [fake.detach() for fake in fakes]
        with self.mode, torch.no_grad():
            replayed = torch.func.functionalize(replay.run, remove="mutations")
            return make_fx(replayed, decomposition_table=DECOMPOSITIONS)(*detached)

    # -- the program ---------------------------------------------------------------------------------------------

    def _captured(self, module: fx.GraphModule, given: int, call: Any) -> Captured:
        graph = module.graph
        _simplify(graph)
        placeholders = list(graph.find_nodes(op="placeholder"))
        names = [*self.parameters, *self.buffers, *self.arguments.names]
        roles = ["param"] * len(self.parameters) + ["buffer"] * len(self.buffers) + ["input"] * len(self.arguments.names)
        output = next(iter(reversed(graph.nodes)))
        flat = list(output.args[0])  # type: ignore[arg-type]
        returned, gradients = flat[: self.returned], flat[self.returned :]
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
        differentiated = []
        for k, gradient in zip(self.differentiated, gradients, strict=True):
            if gradient is not None:
                results.append(Result("grad", placeholders[k].name))
                values.append(gradient)
                differentiated.append(placeholders[k].name)
        for node, value in self._written(graph, placeholders):
            results.append(Result("state", node.name))
            values.append(value)
        output.args = (tuple(values),)
        set_record(output, Record(None, results=tuple(results)))
        _sweep(graph)
        for node in graph.nodes:
            if node.op in ("call_function", "get_attr"):
                self._describe(program, module, node)
        _unfake(graph)
        graph.owning_module = None
        self._refuse(program)
        fp = [p.name for p in placeholders]
        counts = (len(self.parameters), len(self.parameters) + len(self.buffers))
        return Captured(program, tuple(fp[: counts[0]]), tuple(fp[counts[0] : counts[1]]), tuple(fp[counts[1] : given]),
                        self.spec, self.leaves, len(outputs), self.differentiable, tuple(differentiated), call)  # fmt: skip

    def _written(self, graph: fx.Graph, placeholders: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """Buffers that the step writes, with their next values: they become state. Other arguments are refused."""
        found: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node.target is not torch.ops.aten.copy_.default:
                continue
            target, value = node.args[:2]
            record = record_of(target) if target in placeholders else None  # type: ignore[arg-type]
            if record is None or record.role not in ("buffer", "state"):
                origin = self.recorder.origins.get(value, Origin())  # type: ignore[arg-type]
                raise CaptureError(
                    f"the step writes into {'its argument ' if record else ''}{target}, which the caller would see changed\n"
                    f"    {origin.source}   in module {origin.module or 'the root'}\n"
                    f"  write out of place (x = x + 1 instead of x += 1), or make it a buffer of the module"
                )
            found[target] = value  # type: ignore[index,assignment]
            set_record(target, replace(record, role="state"))  # type: ignore[arg-type]
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        return [(node, found[node]) for node in placeholders if node in found]

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
            program.constants[node.name] = Constant.of(tensor)
            node.target = node.name
        set_record(node, Record(_type(node), phase=origin.phase, module=origin.module, source=origin.source))

    def _refuse(self, program: Program) -> None:
        for node in program.nodes:
            name = getattr(node.target, "__name__", "")
            if node.op == "call_function" and name.startswith(RANDOM):
                origin = self.recorder.origins.get(node, Origin())
                raise CaptureError(
                    f"{name} draws random numbers, which have no sharding rule yet\n"
                    f"    {origin.source}   in module {origin.module or 'the root'}\n"
                    f"  set the dropout probability to 0, call model.eval(), or pass the random tensor in"
                )


def _type(node: fx.Node) -> ValueType:
    def one(value: Any) -> ValueType:
        if isinstance(value, torch.Tensor):
            return TensorType(tuple(int(n) for n in value.shape), value.dtype)
        if isinstance(value, (tuple, list)):
            return tuple(one(v) for v in value)  # type: ignore[misc]
        return None

    return one(node.meta.get("val"))


def _simplify(graph: fx.Graph) -> None:
    """Identities go, synonyms get one name, a transpose of a transpose is the value itself, a constant is read once."""
    constants: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            node.replace_all_uses_with(constants.setdefault(node.target, node))
        elif node.target in IDENTITIES and node.op == "call_function":
            node.replace_all_uses_with(node.args[0])
        elif node.target in SYNONYMS:
            node.target = SYNONYMS[node.target]
            rename(node, node.target.__name__.partition(".")[0])
        elif node.target is TRANSPOSE and node.args[0].target is TRANSPOSE:  # type: ignore[union-attr]
            node.replace_all_uses_with(node.args[0].args[0])  # type: ignore[union-attr,arg-type]


def _sweep(graph: fx.Graph) -> None:
    """Erase what nothing reads; every op is functional."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _unfake(graph: fx.Graph) -> None:
    """Fake tensors are made again when a consumer of torch's wants them; they hold memory and modes."""
    for node in graph.nodes:
        for key in list(node.meta):
            if key != "autopar":
                del node.meta[key]


def _output_names(spec: Any, leaves: Sequence[int]) -> list[str]:
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths, _ = pytree.tree_flatten_with_path(tree)
    names = {}
    for path, leaf in paths:
        keys = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path]
        names[leaf] = "_".join("".join(c if c.isalnum() else "_" for c in key) for key in keys) or "out"
    return [names[k] for k in leaves]
