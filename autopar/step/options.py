"""What a training step is told, beside its optimizer."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Options:
    """The keywords of ``parallel.train_step``; their text there."""

    microbatches: int = 1
    recompute: str | tuple[str, ...] | None = None
    zero: int = 0
    clip_norm: float | None = None


def options_of(given: Mapping[str, Any]) -> Options:
    """The options, checked.

    Raises:
        TypeError: an unknown one; it names the nearest.
        ValueError: a value that an option does not take.
    """
    names = [field.name for field in fields(Options)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=2, cutoff=0.4)
            raise TypeError(f"train_step has no option {name!r}; near it: {', '.join(near) or 'none'}. It has {', '.join(names)}")
    if isinstance(given.get("recompute"), list):
        given = {**given, "recompute": tuple(given["recompute"])}
    found = Options(**given)
    if isinstance(found.microbatches, bool) or not isinstance(found.microbatches, int) or found.microbatches < 1:
        raise ValueError(f"microbatches={found.microbatches!r} is no number of micro-batches; give 1 or more")
    if isinstance(found.zero, bool) or found.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={found.zero!r} is no stage of ZeRO: 0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too")
    norm = found.clip_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0):
        raise ValueError(f"clip_norm={norm!r} is no norm above 0; None does not clip, {math.inf} only measures")
    return found
