"""Keep which open options of a step were chosen, and the programs of its micro-batch, for other processes.

The guards are those of the micro-batch that was chosen. They make sure of its numbers; the choice is one of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.cache.cache import Codec
from autopar.cache.codec import Check
from autopar.capture.guards import Guards
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs
from autopar.runtime.processes.agreement import Agreement
from autopar.search.solutions.step_choice import Candidate, StepChoice, choice_from
from autopar.step.compiling.compiled_step import MicroBatch
from autopar.step.compiling.ending import Updating
from autopar.step.kept_steps import facts_of_micro, micro_of, micro_to_json
from autopar.step.options import StepOptions


class Taken(NamedTuple):
    """The way to run a step that was chosen.

    Attributes:
        options: without open ones.
        micro: the programs of one of its micro-batches.
        candidates: what it was compared with.
    """

    options: StepOptions
    micro: MicroBatch
    candidates: tuple[Candidate, ...]


def codec_of_choice(
    compiler: Compiler, inputs: CallInputs, options: StepOptions, key: tuple[Any, ...], updates: Mapping[str, Updating],
    make: Callable[[Agreement | None, Check | None], Taken], inputs_of: Callable[[StepOptions], CallInputs],
) -> Codec[Taken]:  # fmt: skip
    """Return how a choice is kept.

    Args:
        inputs, key: of a call of the whole batch.
        options: with open ones.
        make: compares the ways, and returns the one that is taken.
        inputs_of: options without open ones → the inputs of one of their micro-batches.
    """
    _, trained, cut = key

    def read(content: Any, guards: Guards) -> Taken:
        choice = choice_from(content["choice"])
        zero: Any = choice.zero
        closed = replace(options, microbatches=choice.microbatches, recompute=choice.recompute, zero=zero,
                         compared=options.opened)  # fmt: skip
        return Taken(closed, micro_of(compiler, inputs_of(closed), content["micro"], guards), choice.candidates)

    return Codec(
        kind="choice",
        model=compiler.model,
        facts=lambda: facts_of_micro(compiler, inputs, options, trained, updates, cut, ()),
        make=make,
        guards=lambda taken: taken.micro.captured.guards,
        write=_to_json,
        read=read,
    )


def _to_json(taken: Taken) -> Any:
    options = taken.options
    choice = StepChoice(options.count, options.recompute, options.zero, {}, taken.candidates)
    return {"choice": choice.to_json(), "micro": micro_to_json(taken.micro)}
