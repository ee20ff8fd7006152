"""Collect what decides the capture and the plan of a call, for the key of the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from autopar.cache.code import class_digest, forget_classes
from autopar.cache.described import Descriptions, described_options
from autopar.cache.folder import NotCached
from autopar.cache.kept_capture import structure_key
from autopar.capture.arguments import signature_of
from autopar.capture.guards.reads import HOOKS
from autopar.capture.model_state import model_state
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs
from autopar.search.solutions.solution import Solution
from autopar.torch_private import GLOBAL_HOOKS

# the fields of a compiler that are no options, or are described apart
APART = ("model", "context", "planner", "sizes", "numbers", "cache", "check")
APART_OF_PLANNER = ("agreement", "given", "tables", "below", "first")


def facts_of_call(compiler: Compiler, inputs: CallInputs, notes: Sequence[str]) -> dict[str, Any]:
    """Return what decides the capture and the plan of a call, as JSON by name.

    Raises:
        NotCached: something that decides it has no text; or the call is captured in a way that is not kept.
    """
    if compiler.numbers:
        raise NotCached(f"{compiler.numbers[0].words} changes from call to call, and becomes an input")
    if compiler.serves(inputs):
        raise NotCached("a capture with symbols serves the sizes of the call")
    planner = compiler.planner
    job = None if compiler.context is None else compiler.context.job
    return {
        "model": facts_of_model(compiler.model),
        "call": facts_of_inputs(compiler.model, inputs),
        "options": described_options(_fields(compiler, APART)),
        "planner": described_options(_fields(planner, APART_OF_PLANNER)),
        "given plan": None if planner.given is None else planner.given.to_json(),
        "first plan": None if planner.first is None else _layouts(planner.first),
        "hosts": None if job is None else list(job.hosts.of_rank),
        "dynamic": compiler.sizes.dynamic,
        "symbols": not compiler.sizes.with_numbers(compiler.model, inputs.whole(), compiler.random),
        "notes": list(notes),
    }


def _layouts(plan: Solution) -> Any:
    """Return what decides the layouts of calls of other sizes: those of a plan, without its price and its seconds."""
    content = plan.to_json()
    return [content["graph"], content["values"], content["optimizer_states"]]


def _fields(value: Any, but: Sequence[str]) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in but}


def facts_of_model(model: torch.nn.Module) -> Any:
    """Return the structure of a model: its modules, their classes, hooks and modes; its parameters and buffers."""
    forget_classes()
    named = list(model.named_modules(remove_duplicate=False))
    numbers: dict[int, int] = {}
    descriptions = Descriptions([module for _, module in named], lambda value: isinstance(value, torch.nn.Parameter))
    classes: dict[type, Any] = {}
    rows = []
    for path, module in named:
        cls = type(module)
        if cls not in classes:
            classes[cls] = [cls.__module__, cls.__qualname__, class_digest(cls)]
        hooks = [[name, [descriptions.of(hook) for hook in vars(module)[name].values()]]
                 for name in HOOKS if vars(module)[name]]  # fmt: skip
        rows.append([path, numbers.setdefault(id(module), len(numbers)), list(classes).index(cls), module.training,
                     hooks])  # fmt: skip
    tensors: dict[int, int] = {}
    state = model_state(model)
    facts = [
        [name, tensors.setdefault(id(tensor), len(tensors)), _tensor(tensor)]
        for name, tensor in (*state.all_parameters, *state.all_buffers)
    ]
    everywhere = [descriptions.of(hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()]
    return {"classes": list(classes.values()), "modules": rows, "tensors": facts, "hooks of all modules": everywhere,
            "parameters": len(state.all_parameters)}  # fmt: skip


def _tensor(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype), str(tensor.device), list(tensor.stride()), tensor.requires_grad,
            type(tensor).__name__, tensor.is_leaf]  # fmt: skip


def facts_of_inputs(model: torch.nn.Module, inputs: CallInputs) -> Any:
    """Return the arguments of a call: their structure, tensors and constants, and torch's modes."""
    arguments = inputs.arguments
    signature = signature_of(model_state(model), arguments)
    alike: dict[int, int] = {}
    return {
        "structure": structure_key(arguments.spec),
        "names": [arguments.passed, arguments.names],
        "tensors": [[alike.setdefault(id(tensor), len(alike)), *_tensor(tensor)] for tensor in arguments.tensors],
        "constants": [[kind.__name__, text] for kind, text in signature.constants],
        "modes": repr(signature.modes),
        "whole": arguments.whole,
        "layouts": described_options(inputs.layouts),
        "shapes": described_options(inputs.shapes),
    }
