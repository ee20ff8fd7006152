"""Which values of the forward are computed again in the backward, and not kept: policies.

A policy gives a function from nodes to *regions*. A value made in a region is not kept for the backward of that region; what has
no region is kept. The pass ``recompute`` carries out what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import shown
from autopar.ir.program import Program
from autopar.plan.recompute.min_cut import min_cut
from autopar.plan.recompute.regions import Regions, modules

__all__ = ["Regions", "regions"]


def regions(program: Program, what: str | Sequence[str]) -> Regions:
    """The regions of a traced program.

    Args:
        what: ``"blocks"``, ``"min-cut"``, or globs over module paths.

    Raises:
        TypeError: what is no such thing.
        ValueError: a glob that matches no module of the step, a model without blocks.
    """
    if not isinstance(what, str) and not (isinstance(what, Sequence) and what and all(isinstance(one, str) for one in what)):
        raise TypeError(f'recompute={shown(what)}: say "blocks", "min-cut", or a glob over module paths, as in "*.layers.*", or a list of globs')
    return min_cut(program) if what == "min-cut" else modules(program, what)
