"""Decide by policies which values of the forward are recomputed in the backward, and not kept.

A policy returns a function from nodes to *regions*. A value that is computed in a region is not kept for the backward
of that region; a value without a region is kept. The pass ``recompute`` applies the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import shown
from autopar.ir.program import Program
from autopar.plan.recompute.min_cut import min_cut
from autopar.plan.recompute.regions import Regions, modules

__all__ = ["Regions", "regions"]


def regions(program: Program, what: str | Sequence[str]) -> Regions:
    """Return the regions of a traced program.

    Args:
        what: ``"blocks"``, ``"min-cut"``, or globs over module paths.

    Raises:
        TypeError: ``what`` is neither a string nor a list of strings.
        ValueError: a glob matches no module of the step, or the model has no blocks.
    """
    if not isinstance(what, str) and not (
        isinstance(what, Sequence) and what and all(isinstance(glob, str) for glob in what)
    ):
        raise TypeError(
            f'recompute={shown(what)}: say "blocks", "min-cut", or a glob over module paths, as in "*.layers.*", or a '
            f"list of globs"
        )
    return min_cut(program) if what == "min-cut" else modules(program, what)
