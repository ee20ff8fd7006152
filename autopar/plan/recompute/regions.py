"""Make regions of modules: a model's blocks, or the modules that globs match."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from torch import fx

from autopar.capture.blocks import ancestors, blocks, module_paths
from autopar.ir.nodes import record_of
from autopar.ir.program import Program

Regions = Callable[[fx.Node], str | None]  # from a node of either phase to its region; ``None``: no region


def modules(program: Program, choice: str | Sequence[str]) -> Regions:
    """Return the regions of ``"blocks"`` or of globs; a backward op is in the region of its forward op.

    A glob is matched against ``"." + path`` and against the path, as in a plan. If modules contain each other, the
    outermost is the region.

    Raises:
        ValueError: a glob matches no module that runs an op; no module is a block.
    """
    chosen = chosen_modules(program, choice)

    @cache
    def outermost(path: str) -> str | None:
        return next((outer for outer in ancestors(path) if outer in chosen), None)

    return lambda node: outermost(record_of(node).module)


def chosen_modules(program: Program, choice: str | Sequence[str]) -> frozenset[str]:
    """Return the paths of the modules that ``"blocks"`` or globs mean; ``ValueError`` as ``modules``."""
    paths = module_paths(program)
    chosen = blocks(paths) if choice == "blocks" else matches(paths, [choice] if isinstance(choice, str) else choice)
    if not chosen:
        raise ValueError(
            f'recompute="blocks" takes the numbered modules that contain modules, as layers.0 with layers.0.mlp, and '
            f"the step has none; "
            f"name modules with globs; it has {', '.join(path for path in paths if path) or 'no modules but the root'}"
        )
    return frozenset(chosen)


def matches(paths: Sequence[str], globs: Iterable[str]) -> frozenset[str]:
    """Return the paths that any of the globs matches; ``ValueError`` with the nearest paths if a glob matches none."""
    matching: set[str] = set()
    for glob in globs:
        matched = {path for path in paths if fnmatch.fnmatchcase("." + path, glob) or fnmatch.fnmatchcase(path, glob)}
        if not matched:
            named = [path for path in paths if path]
            near = difflib.get_close_matches(glob.lstrip("*."), named, n=3, cutoff=0.3) or named[:3]
            raise ValueError(
                f"recompute's glob {glob!r} matches no module that the step runs; near it: "
                f"{', '.join(near) or 'there are none'}"
            )
        matching |= matched
    return frozenset(matching)
