"""Make modules that are a model under another forward: its prefill, and its decoding of one token.

A host has the very attributes of the model, so it has the model's tensors, names and flags, now and later. Only its
class is another one. While a program is captured, it has a cache of keys and values of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin


def host(module: torch.nn.Module, **methods: Callable[..., Any]) -> Any:
    """Return the module under a class that derives from its own, and has other methods."""
    kind = type(module)
    own = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})
    made: Any = object.__new__(own)
    object.__setattr__(made, "__dict__", vars(module))
    return made


def cache_keyword(module: torch.nn.Module) -> str:
    """Return the name of forward's argument for the cache: newer versions of transformers call it ``cache``."""
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def prefilling(module: torch.nn.Module) -> Any:
    """Return a host that reads a prompt: the logits of its last token, [batch, 1, vocabulary], and all rows."""
    layers = _layers_of(module)

    def forward(self: Any, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        return _called(module, self, [Rows() for _ in range(layers)], locals())

    return host(module, forward=forward)


def decoding(module: torch.nn.Module) -> Any:
    """Return a host that reads one token behind ``length`` others: its logits, and the new row of each layer.

    ``held`` has the keys and values of each layer, in turn.
    """

    def forward(
        self: Any, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, *,
        length: torch.Tensor, held: Sequence[torch.Tensor],
    ) -> Any:  # fmt: skip
        rows = [HeldRows(*pair, length) for pair in zip(held[::2], held[1::2], strict=True)]
        return _called(module, self, rows, locals())

    return host(module, forward=forward)


def _called(
    module: torch.nn.Module, self: Any, layers: Sequence[Rows], given: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Call the model's own forward with a cache of these layers; return logits, and the rows that it writes."""
    forward = type(module).forward
    known = inspect.signature(forward).parameters
    inputs = {name: given[name] for name in ("input_ids", "attention_mask", "position_ids") if name in known}
    only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    cached = {cache_keyword(module): Cache(layers=[*layers]), "use_cache": True, "return_dict": True}
    outputs = forward(self, **inputs, **cached, **only)
    return outputs.logits[:, -1:], *written(layers)


def _layers_of(module: Any) -> int:
    return len(DynamicCache(config=module.config.get_text_config(decoder=True)).layers)


# -- cache of a capture ------------------------------------------------------------------------------------------------
#
# A layer remembers the rows that forward writes, [batch, heads, new tokens, size of a head], and these are outputs of
# the program. What the cache holds already is an input. So no program returns a whole cache, and none writes in place.


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
