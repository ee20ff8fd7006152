"""Decide by policies which values of the forward are recomputed in the backward, and not kept.

A policy returns a function from nodes to *regions*. A value that is computed in a region is not kept for the backward
of that region; a value without a region is kept. The pass ``recompute`` applies the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.capture.blocks import module_paths
from autopar.errors import shown
from autopar.ir.program import Program
from autopar.plan.recompute.min_cut import min_cut
from autopar.plan.recompute.regions import Regions, chosen_modules, modules

__all__ = ["Regions", "regions", "within"]


def regions(program: Program, what: str | Sequence[str]) -> Regions:
    """Return the regions of a traced program.

    Args:
        what: ``"blocks"``, ``"min-cut"``, or globs over module paths.

    Raises:
        TypeError: ``what`` is neither a string nor a list of strings.
        ValueError: a glob matches no module of the step, or the model has no blocks.
    """
    _check(what)
    return min_cut(program) if what == "min-cut" else modules(program, what)


def within(part: Program, program: Program, what: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Return what is recomputed in a part of a program, as the stage of a pipeline.

    It is the modules of the part that are chosen in the whole; ``None`` if it has none.

    Raises:
        TypeError, ValueError: as ``regions`` of the whole program.
    """
    if what is None or what == "min-cut":
        return what
    _check(what)
    chosen, paths = chosen_modules(program, what), module_paths(part)
    return tuple(path for path in paths if path in chosen) or None


def _check(what: str | Sequence[str]) -> None:
    if not isinstance(what, str) and not (
        isinstance(what, Sequence) and what and all(isinstance(glob, str) for glob in what)
    ):
        raise TypeError(
            f'recompute={shown(what)}: say "blocks", "min-cut", or a glob over module paths, as in "*.layers.*", or a '
            f"list of globs"
        )
