"""Stand in for a model's cache of keys and values while a program is captured.

A layer remembers the rows that forward writes, [batch, heads, new tokens, size of a head], and these are outputs of
the program. What the cache holds already is an input. So no program returns a whole cache, and none writes in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class Rows(CacheLayerMixin):
    """A layer of an empty cache. It hands the new keys and values on.

    Attributes:
        keys, values: the new rows; ``None`` before forward has written them.
    """

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> Any:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers


class HeldRows(Rows):
    """A layer of a cache that holds ``length`` rows in tensors with room for more. It puts one new row behind them.

    Args:
        keys, values: [batch, heads, room, size of a head].
        length: the number of rows that are held, a tensor without dims, so that one program serves all lengths.
    """

    is_compileable = True  # else the mask of a single query would be left out, and rows that hold nothing would count

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor) -> None:
        super().__init__()
        self.held, self.length = (keys, values), length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        super().update(key_states, value_states)
        keys, values = self.held
        here = (torch.arange(keys.shape[2], device=keys.device) == self.length)[:, None]
        return torch.where(here, key_states, keys), torch.where(here, value_states, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held[0].shape[2], 0

    def get_seq_length(self) -> Any:
        return self.length

    def get_max_length(self) -> int:
        return self.held[0].shape[2]

    get_max_cache_shape = get_max_length


def written(layers: Sequence[Rows]) -> list[torch.Tensor]:
    """Return the rows that forward has written: keys and values of each layer.

    Raises:
        TypeError: forward has left a layer out.
    """
    found: list[torch.Tensor] = []
    for k, layer in enumerate(layers):
        if layer.keys is None or layer.values is None:
            raise TypeError(
                f"forward writes no keys and values to layer {k} of its cache, as where layers share them, which "
                f"generation on a mesh does not do; call the model's own generate on a single device"
            )
        found += (layer.keys, layer.values)
    return found
