"""Hold a capture with symbols, and make of it the captures of calls with other sizes; nothing is traced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture.arguments import Arguments, AtSizes
from autopar.capture.assemble import Captured, assemble
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.capture.symbolic.tracer import NoSymbolsError, SymbolicTracer
from autopar.capture.symbolic.validity import Validity
from autopar.gc_pause import gc_paused
from autopar.ir.at_values import at_values
from autopar.ir.ops.seeded_random import Draw, Like, Random
from autopar.ir.sizes import AtValues, Size, Values, map_sizes
from autopar.report.progress import doing


@dataclass(eq=False)
class SymbolicCapture:
    """A call that was captured with symbols for the lengths of its inputs.

    Attributes:
        captured: the capture; its program has symbols.
        validity: the sizes that it serves.
        uses: how many different sizes it was used for.
        placed: what was made of its program: by what decides the layouts.
    """

    captured: Captured
    validity: Validity
    uses: int = 0
    placed: dict[Any, Any] = field(default_factory=dict)

    def at(self, values: Values, sizes: AtSizes) -> Captured:
        """Return the capture of a call with numbers.

        Args:
            values: symbol → its value.
            sizes: the call.
        """
        self.uses += 1
        at, captured = AtValues(values), self.captured

        def plain(value: Any) -> Any:
            return Like(tuple(map(at.size, value.shape)), value.dtype) if isinstance(value, Like) else at.size(value)

        draws = tuple(
            Draw(draw.op, map_sizes(draw.args, plain), map_sizes(draw.kwargs, plain), draw.order)
            for draw in captured.draws
        )
        return replace(
            captured, program=at_values(captured.program, values), draws=draws, at_sizes=sizes,
            symbolic=self, values=dict(values), traced=self.uses == 1,
        )  # fmt: skip

    @property
    def about(self) -> str:
        """The lengths that are symbols, in words: ``s0 is dim 0 of x, s1 is dim 1 of x``."""
        places: dict[Any, str] = {}
        for name, shape in self.validity.shapes.items():
            for d, size in enumerate(shape):
                if isinstance(size, Size) and size.expression in self.validity.values:
                    places.setdefault(size.expression, f"{size} is dim {d} of {name}")
        return ", ".join(places.values())


def capture_with_symbols(
    model: torch.nn.Module, arguments: Arguments, random: Random = "parallel", keep: bool = False
) -> SymbolicCapture:
    """Capture a call with symbols for the lengths of its inputs.

    Raises:
        NoSymbolsError: no length can be a symbol, or a number of the step cannot follow from one.
        Exception: as for ``capture``, and whatever torch raises where it needs a number.
    """
    with ONE_AT_A_TIME, gc_paused():
        tracer = SymbolicTracer(model, arguments, random, keep)
        with doing(tracer.doing):
            captured = assemble(tracer.run(), random)
        made = SymbolicCapture(captured, tracer.validity())
        if not made.validity.values:
            fixed = "; ".join(
                f"{guard.text}" + f", {guard.source}" * bool(guard.source) for guard in made.validity.fixed.values()
            )
            raise NoSymbolsError(f"no length can be a symbol: {fixed or 'the call has no tensors'}")
        return made
