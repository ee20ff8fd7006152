"""Note which loops of the model are unrolled in the program: its size grows with their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autopar.ir.nodes import record_of
from autopar.ir.program import Program

MANY = 16  # calls of one module, above which they are steps of a loop and not shared layers


def about_loops(
    program: Program, model: torch.nn.Module, steps: Mapping[str, int], calls: Mapping[str, int]
) -> Iterator[str]:
    """Yield a sentence for each recurrent layer, and for each module that forward calls many times.

    Modules inside of these get no sentence.

    Args:
        steps: path of a recurrent layer → the number of steps of all its calls.
        calls: path of a module → how often it is called.
    """
    looped = [path for path, count in calls.items() if count > MANY]
    outermost = [path for path in looped if not any(_within(path, other) for other in looped if other != path)]
    # a layer inside a loop is part of that loop
    layers = [path for path in steps if not any(_within(path, other) for other in outermost)]
    modules = [record_of(node).module for node in program.nodes]
    for path in (*layers, *(path for path in outermost if path not in layers)):
        module = model.get_submodule(path)
        subject = f"the {type(module).__name__} {path}" if path else f"the model ({type(module).__name__})"
        lines = sum(_within(other, path) for other in modules)
        predicate = f"is unrolled into {steps[path]} steps" if path in layers else f"is called {calls[path]} times"
        yield (
            f"{subject} {predicate}, which make {lines:,} of the program's {len(modules):,} lines; the time to "
            f"capture grows with them"
        )


def _within(path: str, outer: str) -> bool:
    return path == outer or not outer or path.startswith(f"{outer}.")
