"""Keep the captures of calls for other processes, with what decides them, and whatever else is made of a capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch

from autopar.cache.cache import Codec
from autopar.cache.code import class_digest, forget_classes
from autopar.cache.described import Descriptions, described_options
from autopar.cache.folder import NotCached
from autopar.cache.kept_capture import captured_of, captured_to_json, structure_key, symbols_of, symbols_to_json
from autopar.cache.records import Leaf, Records
from autopar.capture import Captured
from autopar.capture.arguments import signature_of
from autopar.capture.guards import Guards
from autopar.capture.guards.reads import HOOKS
from autopar.capture.model_state import model_state
from autopar.ir.program import Program
from autopar.model.captures import HasCapture
from autopar.model.compiled import RUNS, Compiled, Compiler
from autopar.model.inputs import CallInputs
from autopar.report.passes import PassReport, Reports
from autopar.runtime.localize import LocalPrograms
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.solution import Solution
from autopar.torch_private import GLOBAL_HOOKS

C = TypeVar("C", bound=HasCapture)


class KeptCall(NamedTuple):
    """What is kept of a captured call: fields of ``Compiled``; ``traced`` if there may be parts of the backward."""

    captured: Captured
    program: Program
    local: LocalPrograms
    reports: tuple[PassReport, ...]
    found: Solution | None
    symbolic: Program | None
    traced: Callable[[], Program] | None


def codec_of_captured(
    kind: str,
    record: type[C],
    compiler: Compiler,
    inputs: CallInputs,
    facts: Callable[[], Mapping[str, Any]],
    more: Mapping[Any, Leaf] | None = None,
    loss: Callable[[Captured], int | None] = lambda captured: None,
) -> Codec[C]:
    """Return how a record is kept that was made of the capture of a call.

    Args:
        kind: what it is, in a few words.
        facts: returns what decides it.
        more: class → the form of its values, where records have no own.
        loss: returns the position of the loss of a capture, if it is trained.
    """

    def records(guards: Guards | None = None, content: Any = None) -> Records:
        def write(captured: Captured) -> Any:
            return [captured_to_json(captured), symbols_to_json(captured), loss(captured)]

        def read(row: Any) -> Captured:
            assert guards is not None
            return replace(_captured_here(compiler, inputs, row, made.program(), guards), loss=row[2])

        leaves = {Captured: Leaf(write, read, shared=True), Solution: SOLUTION, **(more or {})}
        made = Records(leaves, content, RUNS)
        return made

    return Codec(
        kind=kind,
        model=compiler.model,
        facts=facts,
        guards=lambda made: made.captured.guards,
        write=lambda made: records().to_json(made, record),
        read=lambda content, guards: records(guards, content).read(content["record"], record),
    )


SOLUTION = Leaf(Solution.to_json, lambda content: replace(from_json(content), source=""))


def codec_of_call(compiler: Compiler, inputs: CallInputs, notes: Sequence[str]) -> Codec[Compiled]:
    """Return how the capture of a call is kept."""
    codec = codec_of_captured("call", KeptCall, compiler, inputs, lambda: facts_of_call(compiler, inputs, notes))
    return codec.around(_kept, partial(_compiled, compiler, inputs))


def _kept(compiled: Compiled) -> KeptCall:
    traced = compiled.traced
    assert traced is not None
    several = len(compiled.captured.differentiable) > 1
    return KeptCall(compiled.captured, compiled.program, compiled.local, compiled.reports, compiled.found,
                    compiled.symbolic, (lambda: traced) if several else None)  # fmt: skip


def _compiled(compiler: Compiler, inputs: CallInputs, kept: KeptCall) -> Compiled:
    @cache
    def traced() -> Captured:
        assert kept.traced is not None
        return replace(kept.captured, program=kept.traced())

    @cache
    def part(positions: frozenset[int]) -> Compiled:
        return compiler.part_of(traced(), compiler.constraints_of(traced(), inputs)[0], kept.program, positions)

    return Compiled(kept.captured, kept.program, kept.local, Reports(kept.reports), part, compiler.context, kept.found,
                    kept.symbolic)  # fmt: skip


def _captured_here(compiler: Compiler, inputs: CallInputs, row: Any, program: Program, guards: Guards) -> Captured:
    """Return the capture of a call, as if it was made in this process.

    ``program``: the explicit one, in the place of the traced one, which is not kept.
    """
    whole = inputs.whole()
    captured, symbolic = captured_of(row[0], program, guards), symbols_of(row[1], guards)
    compiler.sizes.took(whole, guards, symbolic)
    values = {} if symbolic is None else symbolic.validity.values
    return replace(captured, at_sizes=compiler.sizes.at(whole), symbolic=symbolic, values=values)


# -- what decides a capture --------------------------------------------------------------------------------------------

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
        "options": described_options(fields_of(compiler, APART)),
        "planner": described_options(fields_of(planner, APART_OF_PLANNER)),
        "given plan": None if planner.given is None else planner.given.to_json(),
        "first plan": None if planner.first is None else _layouts(planner.first),
        "hosts": None if job is None else list(job.hosts.of_rank),
        "dynamic": compiler.sizes.dynamic,
        "symbols": not compiler.sizes.with_numbers(inputs.whole()),
        "notes": list(notes),
    }


def _layouts(plan: Solution) -> Any:
    """Return what decides the layouts of calls of other sizes: those of a plan, without its price and its seconds."""
    content = plan.to_json()
    return [content["graph"], content["values"], content["optimizer_states"]]


def fields_of(value: Any, but: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a dataclass by name, but some."""
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
