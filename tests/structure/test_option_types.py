"""Options that are words have types that list the words: these are the ones that are accepted at run time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import autopar
from autopar.ir import mesh, program
from autopar.ir.ops.seeded_random import RANDOM, Random
from autopar.model.inputs import INPUTS, Inputs
from autopar.parallel import OUTPUTS, Outputs, Parallel
from autopar.passes import Amp, Reshard
from autopar.passes.amp import GRADIENTS, Gradients
from autopar.passes.reshard import MODES, Mode
from autopar.pipeline import Times, build, optimise
from autopar.pipeline.bounds import OBJECTIVES, Objective
from autopar.pipeline.memory import HELD, Held
from autopar.plan.precision.policy import ALIASES, POLICIES, AmpName, Kept
from autopar.step.compiling.outputs import WAYS, Way
from autopar.step.options import (
    CLIPPED,
    RETURNED,
    Clipped,
    Opened,
    Returned,
    StepKeywords,
    StepOptions,
    Zero,
    options_of,
)

LINEAR = torch.nn.Linear(2, 2)
PROGRAM = "program LEVEL on dp=1\n  x : f32[2 2] = input\nforward:\n  neg : f32[2 2] = neg(x)\n  return neg\n"


def parallelized(**options: Any) -> None:
    autopar.parallelize(LINEAR, mesh.Mesh(dp=1), **options)


def run(one: Any) -> None:
    one.run(program.Program.parse(PROGRAM.replace("LEVEL", one.takes)))


ACCEPTED: dict[str, tuple[Any, Callable[[Any], object]]] = {  # option → its type, and a call that takes a value
    "inputs": (Inputs, lambda value: parallelized(inputs=value)),
    "outputs": (Outputs, lambda value: parallelized(outputs=value)),
    "random": (Random, lambda value: parallelized(random=value)),
    "amp": (AmpName, lambda value: options_of({"amp": value})),
    "keep with bf16": (
        Literal["f32", "bf16"],
        lambda value: options_of({"amp": "bf16", "keep": {"aten::silu": value}}),
    ),
    "keep with fp16": (Literal["f32", "f16"], lambda value: options_of({"amp": "fp16", "keep": {"aten::silu": value}})),
    "zero": (Zero, lambda value: options_of({"zero": value})),
    "microbatches": (Opened, lambda value: options_of({"microbatches": value if isinstance(value, str) else "no"})),
    "clip_parameters": (Clipped, lambda value: options_of({"clip_norm": 1.0, "clip_parameters": value})),
    "returns": (Returned, lambda value: options_of({"returns": value})),
    "a way to join": (Way, lambda value: options_of({"returns": {"logits": value}})),
    "mode": (Mode, lambda value: run(Reshard(value))),
    "gradients": (Gradients, lambda value: run(Amp("bf16-O1", gradients=value))),
    "held": (Held, lambda value: build("1f1b", 2, 2).simulate(held=[value])),
    "objective": (Objective, lambda value: optimise(Times(), 2, 2, objective=value)),
}
TABLES = (INPUTS, OUTPUTS, RANDOM, POLICIES, ALIASES, CLIPPED, RETURNED, WAYS, MODES, GRADIENTS, HELD, OBJECTIVES)
TRIED = {*(word for table in TABLES for word in table), "f32", "bf16", "f16", *range(-1, 6), "gloabl", "W"}


@pytest.mark.parametrize("option", ACCEPTED)
def test_the_type_lists_what_is_accepted(option: str) -> None:
    type, call = ACCEPTED[option]
    for value in get_args(type):
        call(value)
    for value in TRIED - set(get_args(type)):
        with pytest.raises((ValueError, TypeError)):
            call(value)


def literals(annotation: Any) -> set[Any]:
    """The words of an annotation, which may allow other types too."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {word for part in get_args(annotation) for word in literals(part)}


def words(types: Iterable[Any]) -> set[Any]:
    return {word for type in types for word in get_args(type)}


def test_the_words_of_policies_of_precision() -> None:
    assert set(get_args(AmpName)) == {*POLICIES, *ALIASES}
    assert set(get_args(Kept)) == words(ACCEPTED[option][0] for option in ("keep with bf16", "keep with fp16"))


def test_the_public_signatures_have_the_types() -> None:
    for function in (autopar.parallelize, Parallel.__init__):
        written = inspect.signature(function).parameters
        for option, name in (("inputs", "Inputs"), ("outputs", "Outputs"), ("random", "Random")):
            assert written[option].annotation == name
    hints = get_type_hints(StepKeywords)
    assert [*hints] == [field.name for field in fields(StepOptions) if field.compare]
    wanted = {
        "microbatches": [Opened],
        "amp": [AmpName],
        "keep": [Kept],
        "zero": [Zero],
        "clip_parameters": [Clipped],
        "returns": [Returned, Way],
    }
    assert {option: found for option, hint in hints.items() if (found := literals(hint))} == {
        option: words(types) for option, types in wanted.items()
    }
    assert inspect.signature(Parallel.train_step).parameters["options"].annotation == "Unpack[StepKeywords]"
