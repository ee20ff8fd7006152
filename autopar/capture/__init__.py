"""Capture: the model's step, forward and backward, as one static graph of functional ATen ops.

One ``make_fx`` trace under fake tensors. Every argument is a fake tensor of its own, so that the same tensor passed
twice stays two inputs; tied parameters are the only aliases kept. A second trace functionalizes, only where an op that
writes in place appears. The joint graph holds both phases.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.arguments import Arguments, bind_arguments
from autopar.capture.assemble import Captured, assemble
from autopar.capture.guards.numbers import Taken, can_be_input, put_in, taken_by, tracked
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.capture.trace import Tracer
from autopar.gc_pause import gc_paused
from autopar.report.progress import doing

__all__ = ["Captured", "capture"]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    random: str = "parallel",
    numbers: Sequence[GuardedPlace] = (),
) -> Captured:
    """Trace ``model(*args, **kwargs)`` and its backward.

    Outputs that require gradients get one tangent each. Under ``torch.no_grad()`` there is no backward. The model and
    the arguments are only read: whatever forward does to the model is undone. One capture runs at a time. ``random`` is that of
    ``parallelize``. Of ``numbers``, places that hold floats, those become inputs that can.

    Raises:
        CaptureError: control flow on the values of tensors, a random op whose numbers cannot be those of a stream, an argument that cannot be flattened, a tensor
            that forward writes or keeps where it cannot be followed.
    """
    return capture_call(model, bind_arguments(model, args, kwargs or {}), random, numbers)


def capture_call(model: torch.nn.Module, arguments: Arguments, random: str = "parallel", numbers: Sequence[GuardedPlace] = ()) -> Captured:
    """``capture`` of a call whose arguments are bound already."""
    with ONE_AT_A_TIME, gc_paused():

        def assembled(inputs: Collection[tuple[int, str]] = ()) -> Captured:
            tracer = Tracer(model, arguments, random, inputs)
            with doing(tracer.doing):
                return assemble(tracer.run(), random)

        def taken(places: Sequence[GuardedPlace]) -> list[Taken] | None:
            """Where the step takes the numbers in these places; ``None`` where they cannot be inputs."""
            try:
                with tracked(places) as book, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    other = assembled({place.identity for place in places})
            except Exception:  # it was captured with the number itself
                return None
            alike = repr(other.leaves) == repr(captured.leaves) and repr(other.draws) == repr(captured.draws)
            return taken_by(captured.program, other.program, book) if alike else None

        captured = assembled()
        places = [place for place in numbers if can_be_input(place) and taken([place]) is not None]
        found = taken(places) if places else None
        if found is None:
            return captured
        return replace(captured, numbers=put_in(captured.program, found), guards=captured.guards.without(places))
