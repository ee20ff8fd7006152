"""Find the rule of a call whose op has none, by a discovery that registers itself here.

The discovery runs ops, in a package above the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.record import TensorType
from autopar.rules.registry import Rule
from autopar.torch_private import OpOverload


@dataclass(frozen=True)
class Finding:
    """A rule for a call, or why there is none."""

    rule: Rule | None
    why: str = ""


Discovery = Callable[[Rule, OpOverload, Sequence[Any], Mapping[str, Any], Sequence[TensorType | None]], Finding]

_DISCOVERIES: list[Discovery] = []


def discover_with(discovery: Discovery) -> Discovery:
    """Register ``discovery``: a function of the op's empty rule, the op, its arguments and the types of its results."""
    _DISCOVERIES[:] = [discovery]
    return discovery


def discovered(
    rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorType | None]
) -> Finding:
    """Return the rule of one call of an op that has none; without a registered discovery, no rule."""
    return _DISCOVERIES[0](rule, op, args, kwargs, results) if _DISCOVERIES else Finding(None)
