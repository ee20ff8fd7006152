"""Let attention know that its mask is causal, where the trace has made the mask of positions.

le : bool[2 1 64 64] = le(keys, queries)               …
o = scaled_dot_product_attention(q, k, v, le)    →     o = scaled_dot_product_attention(q, k, v, is_causal=True)

So the kernel skips what the mask hides, and the mask is not made. In eager, models find this out by the values of
positions, which a trace does not have.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autopar.capture.positions.follow import PositionsOf
from autopar.capture.positions.holds import hides_later_keys
from autopar.capture.provenance import Recorder
from autopar.torch_private import node_of

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass
class MasksOfPositions:
    """Looks at the masks of attention in one trace.

    Attributes:
        recorder: that of the trace.
        left_out: how many masks were causal, and how many hid nothing.
    """

    recorder: Recorder
    left_out: collections.Counter[bool] = field(default_factory=collections.Counter)

    @cached_property
    def _positions(self) -> PositionsOf:
        return PositionsOf()

    def attend(self, attention: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        """Call attention, without a mask that is causal or hides nothing."""
        given = dict(zip(NAMES, args, strict=False)) | kwargs
        mask = given.get("attn_mask")
        looks = isinstance(mask, torch.Tensor) and mask.dim() >= 2 and not mask.requires_grad
        is_causal = self._is_causal(mask) if looks and not given.get("is_causal") else None
        if is_causal is None:
            return attention(*args, **kwargs)
        self.left_out[is_causal] += self.recorder.phase == "forward"  # a checkpoint calls again in the backward
        return attention(**given | {"attn_mask": None, "is_causal": is_causal})

    def _is_causal(self, mask: torch.Tensor) -> bool | None:
        """Return whether a mask is causal; ``False`` if it hides nothing; ``None`` for another mask."""
        node = node_of(mask)
        found = None if node is None else self._positions.at(node)
        return None if found is None else hides_later_keys(found, mask.dtype)

    def notes(self) -> tuple[str, ...]:
        """Say which masks are left out."""
        said = {
            True: "attention runs as causal, without the mask that forward makes of positions",
            False: "attention runs without the mask that forward makes, which hides nothing",
        }
        return tuple(
            f"{words} ({count} call{'s' * (count > 1)})"
            for kind, words in said.items()
            if (count := self.left_out[kind])
        )
