"""Capture the model's step, forward and backward, as one static graph of functional ATen ops.

Capture is one ``make_fx`` trace under fake tensors. Every argument gets a fake tensor of its own, so a tensor that is
passed twice becomes two inputs; tied parameters are the only aliases that are kept. If the trace contains an op that
writes in place, a second trace makes the graph functional. The joint graph holds both phases.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.arguments import Arguments, at_sizes, bind_arguments
from autopar.capture.assemble import Captured, assemble
from autopar.capture.guards.numbers import Taken, can_be_input, put_in, taken_by, tracked
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.capture.trace import Tracer
from autopar.gc_pause import gc_paused
from autopar.ir.ops.seeded_random import Random
from autopar.report.progress import doing

__all__ = ["Captured", "capture"]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    random: Random = "parallel",
    numbers: Sequence[GuardedPlace] = (),
    keep: bool = False,
) -> Captured:
    """Trace ``model(*args, **kwargs)`` and its backward.

    Each output that requires gradients gets one tangent. Under ``torch.no_grad()`` there is no backward. Capture leaves
    the model and the arguments as they were: it undoes whatever forward does to the model. Only one capture runs at a
    time.

    Args:
        random: as in ``parallelize``.
        numbers: places that hold floats. Those that can be inputs of the program become inputs.
        keep: whether the first value is kept of what forward draws, advances, reads from a clock, or reads and changes.

    Raises:
        CaptureError: the step has control flow on the values of tensors, or a random op whose numbers cannot come from
            a stream; it does in Python what a captured step does not repeat; an argument cannot be flattened; or
            forward writes or keeps a tensor in a place that capture cannot follow.
    """
    return capture_call(model, bind_arguments(model, args, kwargs or {}), random, numbers, keep)


def capture_call(
    model: torch.nn.Module,
    arguments: Arguments,
    random: Random = "parallel",
    numbers: Sequence[GuardedPlace] = (),
    keep: bool = False,
) -> Captured:
    """``capture`` of a call whose arguments are bound already."""
    with ONE_AT_A_TIME, gc_paused():

        def assembled(inputs: Collection[tuple[int, str]] = ()) -> Captured:
            tracer = Tracer(model, arguments, random, inputs, keep)
            with doing(tracer.doing):
                return assemble(tracer.run(), random)

        def taken(places: Sequence[GuardedPlace]) -> list[Taken] | None:
            """Return where the step uses the numbers in these places; ``None`` if they cannot be inputs."""
            try:
                with tracked(places) as book, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    other = assembled({place.identity for place in places})
            except Exception:  # the capture with the number itself has succeeded already
                return None
            alike = repr(other.leaves) == repr(captured.leaves) and repr(other.draws) == repr(captured.draws)
            return taken_by(captured.program, other.program, book) if alike else None

        captured = replace(
            assembled(), at_sizes=at_sizes(arguments, lambda a: capture_call(model, a, random, keep=keep).program)
        )
        places = [place for place in numbers if can_be_input(place) and taken([place]) is not None]
        taken_numbers = taken(places) if places else None
        if taken_numbers is None:
            return captured
        return replace(
            captured, numbers=put_in(captured.program, taken_numbers), guards=captured.guards.without(places)
        )
