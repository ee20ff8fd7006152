"""Keep which open options of a step were chosen, and the programs of its micro-batch, for other processes.

The guards are those of the micro-batch that was chosen. They make sure of its numbers; the choice is one of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cache.cache import Codec
from autopar.capture.guards import Guards
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs
from autopar.report.passes import PassReport
from autopar.search.solutions.step_choice import Candidate, StepChoice, choice_from
from autopar.step.compiling.compiled_step import MicroBatch
from autopar.step.compiling.ending import Updating
from autopar.step.kept_steps import codec_of_micro
from autopar.step.options import StepOptions


@dataclass(frozen=True)
class Taken:
    """The way to run a step that was chosen.

    Attributes:
        options: without open ones.
        micro: the programs of one of its micro-batches.
        candidates: what it was compared with.
        reports: of the cache.
    """

    options: StepOptions
    micro: MicroBatch
    candidates: tuple[Candidate, ...]
    reports: tuple[PassReport, ...] = ()


def codec_of_choice(
    compiler: Compiler, inputs: CallInputs, options: StepOptions, key: tuple[Any, ...], updates: Mapping[str, Updating],
    inputs_of: Callable[[StepOptions], CallInputs],
) -> Codec[Taken]:  # fmt: skip
    """Return how a choice is kept.

    Args:
        inputs, key: of a call of the whole batch.
        options: with open ones.
        inputs_of: options without open ones → the inputs of one of their micro-batches.
    """

    def codec(inputs: CallInputs) -> Codec[MicroBatch]:
        return codec_of_micro("choice", MicroBatch, compiler, inputs, options, key, updates, ())

    def write(taken: Taken) -> Any:
        options = taken.options
        choice = StepChoice(options.count, options.recompute, options.zero, {}, taken.candidates)
        return {"choice": choice.to_json(), "micro": micro.write(taken.micro)}

    def read(content: Any, guards: Guards) -> Taken:
        choice = choice_from(content["choice"])
        zero: Any = choice.zero
        closed = replace(options, microbatches=choice.microbatches, recompute=choice.recompute, zero=zero,
                         compared=options.opened)  # fmt: skip
        return Taken(closed, codec(inputs_of(closed)).read(content["micro"], guards), choice.candidates)

    micro = codec(inputs)
    return Codec(micro.kind, micro.model, micro.facts, lambda taken: micro.guards(taken.micro), write, read)
