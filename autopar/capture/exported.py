"""Make a module of an exported program, which is then captured as any other.

``torch.export`` keeps one graph, with the module and the line of each op as data. The module runs that graph, and tells
a running capture of both. It has the names and the signature of the model that was exported.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from autopar.capture.constrained import running_capture
from autopar.capture.provenance import is_users, quoted
from autopar.errors import CaptureError
from autopar.torch_private import OpOverload, positional_arguments

TRAINING = "TRAINING"  # the dialect of what torch.export.export returns
DYNAMO_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
FRAME = re.compile(r'File "(.+)", line (\d+), in ')

MODE = (
    "an exported program keeps the mode in which it was exported, so train() and eval() cannot change it\n"
    "  leave them out, or export the model in the other mode: model.eval(), then torch.export.export(model, …)"
)


def exported_module(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """Return a module that runs an exported program.

    It refuses calls that the guards of the export do not admit, and ``train()`` and ``eval()``. A program that
    was decomposed runs, but has no gradients: decompositions drop ``detach()`` and ``torch.no_grad()``.

    Raises:
        CaptureError: the program has a backward already.
    """
    if program.graph_signature.backward_signature is not None:
        raise CaptureError(
            "the exported program has a backward already, and autopar makes one of its own\n"
            "  pass what torch.export.export(model, args) returns"
        )
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    if program.dialect != TRAINING:
        _refuse_gradients_in(module.graph, program.dialect)
    for node in module.graph.find_nodes(op="call_module"):
        module.set_submodule(str(node.target), _Guards(module.get_submodule(str(node.target))))
    for part in module.modules():  # a region without gradients is a module of its own
        if isinstance(part, fx.GraphModule):
            tell_origins(part)
            part.recompile()
    names = list(inspect.signature(module.forward).parameters)[: positional_arguments(program)]
    module.register_forward_pre_hook(functools.partial(_by_position, names), with_kwargs=True, prepend=True)
    for name in ("train", "eval"):
        setattr(module, name, types.MethodType(_refuse_mode, module))
    return module


def _by_position(
    names: Sequence[str], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass by position what was exported by position, as the program takes it in no other way."""
    placed, named = list(args), dict(kwargs)
    for name in names[len(args) :]:
        if name not in named:
            break
        placed.append(named.pop(name))
    return tuple(placed), named


def is_exported(module: torch.nn.Module) -> bool:
    """Return whether a module runs an exported program."""
    return getattr(vars(module).get("train"), "__func__", None) is _refuse_mode


def _refuse_mode(module: torch.nn.Module, mode: bool = True) -> NoReturn:
    raise RuntimeError(MODE)


class _Guards(torch.nn.Module):
    """Checks the arguments of a call as the exported program does, and says what to do about others."""

    def __init__(self, guards: torch.nn.Module) -> None:
        super().__init__()
        self.guards = guards

    def forward(self, *args: Any) -> None:
        try:
            self.guards(*args)
        except (AssertionError, AttributeError) as error:
            raise CaptureError(
                f"the exported program does not take this call: {error}\n"
                f"  call it with sizes in the range of its export, or export it for more of them: "
                f"torch.export.export(model, args, dynamic_shapes=…)"
            ) from error


def _refuse_gradients_in(graph: fx.Graph, dialect: str) -> None:
    """Let a graph refuse to be run where its result would have gradients."""
    tensors = (*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"))
    if tensors:
        with graph.inserting_after(tensors[-1]):
            graph.call_function(inference_only, (tensors, dialect))


def inference_only(tensors: Sequence[Any], dialect: str) -> None:
    """Refuse gradients of the tensors of a program that was decomposed."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise CaptureError(
            f"the exported program was decomposed (its dialect is {dialect}), and its gradients would be others than "
            f"the model's: decompositions drop detach() and torch.no_grad()\n"
            f"  pass the program before run_decompositions(), or call it under torch.no_grad()"
        )


def tell_origins(module: fx.GraphModule) -> None:
    """Let a graph tell a running capture the module and the line of each op, and what modules return."""
    told: tuple[str, str] | None = None
    returned = _returned(module.graph)
    for node in list(module.graph.nodes):
        if node.op == "output":
            with module.graph.inserting_before(node):
                module.graph.call_function(tell_origin, ("", ""))
        if node.op not in ("call_function", "call_method"):
            continue
        origin = _module_of(node), _line_of(node)
        if origin != told and "nn_module_stack" in node.meta:
            with module.graph.inserting_before(node):
                module.graph.call_function(tell_origin, origin)
            told = origin
        if not isinstance(node.target, OpOverload):  # it may run a region, which tells others
            told = None
        for path in returned.get(node, ()):
            with module.graph.inserting_after(node):
                module.graph.call_function(tell_returned, (path, node))


def tell_origin(module: str, line: str) -> None:
    """Tell a running capture where the next ops come from."""
    if (capture := running_capture()) is not None:
        capture.come_from(module, line)


def tell_returned(module: str, value: Any) -> None:
    """Tell a running capture what a module returns."""
    if (capture := running_capture()) is not None and isinstance(value, torch.Tensor):
        capture.returns(module, value)


def _stack(node: fx.Node) -> Mapping[str, tuple[str, Any]]:
    """Return call → (module path, class) of the calls around a node, the outermost first."""
    return node.meta.get("nn_module_stack") or {}


def _module_of(node: fx.Node) -> str:
    """Return the path of the innermost module; torch.compile writes it as ``L['self'].up``."""
    path = next((str(path) for path, _ in reversed(list(_stack(node).values()))), "")
    return DYNAMO_ROOT.sub("", path)


def _line_of(node: fx.Node) -> str:
    """Return the user's innermost line; "" for a program that was loaded, which has none."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return next((quoted(file, int(number)) for file, number in reversed(frames) if is_users(file)), "")


def _returned(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """Return value → the modules that return it: it is the only value of a call that ops outside of the call read."""
    read: dict[str, dict[fx.Node, str]] = {}
    for node in graph.nodes:
        for call, (path, _) in _stack(node).items():
            if path and any(call not in _stack(user) for user in node.users):
                read.setdefault(call, {})[node] = path
    returned: dict[fx.Node, list[str]] = {}
    for values in read.values():
        if len(values) == 1:
            ((node, path),) = values.items()
            returned.setdefault(node, []).append(path)
    return returned
