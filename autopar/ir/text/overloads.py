"""Check that an op's overload takes tensors where its arguments are values.

``mul`` takes numbers, ``mul.Tensor`` tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import fx

from autopar.ir.text.printer import target_name
from autopar.torch_private import OpOverload, mutates, tensor_arguments


def misplaced(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type = fx.Node) -> str | None:
    """Return what is wrong with the arguments, and which overloads take them; ``None`` if all is right.

    Args:
        kind: the class of values among the arguments.
    """
    places = [place for place, value in (*enumerate(args), *kwargs.items()) if _has_value(value, kind)]
    wrong = [place for place in places if place not in _takes_tensors(op)]
    if not wrong:
        return None
    packet = op.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    fitting = [target_name(other) for other in others if set(places) <= _takes_tensors(other) and not mutates(other)]
    remedy = f"; an overload of it that does is {' or '.join(fitting)}" if fitting else ""
    return f"{target_name(op)} takes no tensor as its argument {wrong[0]}{remedy}"


@cache
def _takes_tensors(op: OpOverload) -> frozenset[int | str]:
    return frozenset(place for position, name, _ in tensor_arguments(op) for place in (position, name))


def _has_value(argument: object, kind: type) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(_has_value(part, kind) for part in argument)
    return isinstance(argument, kind)
