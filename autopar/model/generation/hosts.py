"""Make modules that are a model under another forward: its prefill, and its decoding of one token.

A host has the very attributes of the model, so it has the model's tensors, names and flags, now and later. Only its
class is another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from autopar.model.generation.traced_cache import HeldRows, Rows, written


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
