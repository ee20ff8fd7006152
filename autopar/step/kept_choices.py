"""Keep which open options of a step were chosen, and the programs of its micro-batch, for other processes.

The guards are those of the micro-batch that was chosen. They make sure of its numbers; the choice is one of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.cache.cache import Codec
from autopar.capture.guards import Guards
from autopar.report.passes import PassReport
from autopar.search.solutions.step_choice import Candidate, StepChoice, choice_from
from autopar.step.compiling.compiled_step import CompiledMicro
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
    micro: CompiledMicro
    candidates: tuple[Candidate, ...]
    reports: tuple[PassReport, ...] = ()


def codec_of_choice(
    options: StepOptions, closed: StepOptions, codec_of: Callable[[StepOptions], Codec[CompiledMicro]]
) -> Codec[Taken]:
    """Return how a choice is kept.

    Args:
        options: with open ones.
        closed: those of the way that captures the whole batch.
        codec_of: options without open ones → how the programs of one of their micro-batches are kept.
    """

    def write(taken: Taken) -> Any:
        options = taken.options
        choice = StepChoice(options.count, options.recompute, options.zero, {}, taken.candidates)
        return {"choice": choice.to_json(), "micro": codec_of(options).write(taken.micro)}

    def read(content: Any, guards: Guards) -> Taken:
        choice = choice_from(content["choice"])
        zero: Any = choice.zero
        way = replace(options, microbatches=choice.microbatches, recompute=choice.recompute, zero=zero,
                      compared=options.opened)  # fmt: skip
        return Taken(way, codec_of(way).read(content["micro"], guards), choice.candidates)

    micro = codec_of(closed)
    return Codec(micro.kind, micro.model, micro.facts, lambda taken: micro.guards(taken.micro), write, read)
