"""Refuse what generation on a mesh does not do: options of ``generate``, and models, each with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from autopar.errors import class_of, shown


class Refusal(NamedTuple):
    """An option of ``generate`` that is refused.

    Attributes:
        given: whether a value asks for what is refused.
        why: what it would do.
        remedy: what to do instead.
        of_model: whether it counts in the model's own config, too.
    """

    given: Callable[[Any], bool]
    why: str
    remedy: str
    of_model: bool = True


def _is_there(value: Any) -> bool:
    return value is not None and value is not False


ALONE = "or call the model's own generate on a single device"
CACHE = Refusal(_is_there, "the cache is made on the mesh, in pieces", f"leave it out, {ALONE}")
ASSISTED = Refusal(_is_there, "assisted decoding takes tokens back from the cache", f"leave it out, {ALONE}")
OTHER_SEARCH = Refusal(_is_there, "it is another search than greedy and sampling", f"leave it out, {ALONE}")
MORE_OUTPUTS = Refusal(_is_there, "a decoding step returns logits alone", f"call parallel(input_ids, …), {ALONE}")

REFUSED: dict[str, Refusal] = {
    "num_beams": Refusal(lambda v: bool(v and v > 1), "beams reorder the cache", f"leave num_beams at 1, {ALONE}"),
    "assistant_model": ASSISTED,
    "prompt_lookup_num_tokens": ASSISTED,
    "assistant_early_exit": ASSISTED,
    "penalty_alpha": OTHER_SEARCH,
    "dola_layers": OTHER_SEARCH,
    "constraints": OTHER_SEARCH,
    "force_words_ids": OTHER_SEARCH,
    "custom_generate": OTHER_SEARCH,
    "guidance_scale": Refusal(
        lambda v: v is not None and v != 1, "it calls the model a second time for each token", f"leave it out, {ALONE}"
    ),
    "use_cache": Refusal(
        lambda v: v is False, "each token would be another length, and another capture", "leave use_cache out", False
    ),
    "cache_implementation": CACHE,
    "past_key_values": CACHE,
    "cache": CACHE,
    "prefill_chunk_size": Refusal(_is_there, "the prompt is read in one call", "leave it out"),
    "max_time": Refusal(
        _is_there, "the ranks would stop after different numbers of tokens", "give max_new_tokens instead"
    ),
    "output_attentions": MORE_OUTPUTS,
    "output_hidden_states": MORE_OUTPUTS,
    "inputs_embeds": Refusal(_is_there, "the first tokens are ids", "pass input_ids"),
    "synced_gpus": Refusal(_is_there, "all ranks generate the same tokens already", "leave it out"),
}  # fmt: skip


def option(name: str, options: Mapping[str, Any], module: Any = None) -> Any:
    """Return an option of ``generate`` as transformers finds it: given, in the given config, or in the model's."""
    configs = (options.get("generation_config"), getattr(module, "generation_config", None))
    places = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in places if value is not None), None)


def refuse_options(options: Mapping[str, Any], module: Any) -> None:
    """Raise ``ValueError`` for the first option that is refused, whether it is given or in the model's config."""
    for name, refusal in REFUSED.items():
        value = option(name, options, module if refusal.of_model else None)
        if refusal.given(value):
            text = f"{name}={shown(value)}" if isinstance(value, (bool, int, float, str)) else name
            raise ValueError(f"generation on a mesh has no {text}: {refusal.why}; {refusal.remedy}")


def refuse_model(module: Any) -> None:
    """Raise ``TypeError`` for a model that generation on a mesh is not made for."""
    from transformers import DynamicCache, GenerationMixin
    from transformers.cache_utils import DynamicLayer

    if not isinstance(module, GenerationMixin):
        adapters = "; for adapters, parallelize model.merge_and_unload()" * hasattr(module, "merge_and_unload")
        raise TypeError(
            f"{class_of(module)} has no generate of transformers' GenerationMixin; parallelize a causal language model "
            f"of transformers, or write the loop with parallel(…){adapters}"
        )
    config: Any = module.config  # type: ignore[attr-defined]
    if config.is_encoder_decoder:
        raise TypeError(
            f"{class_of(module)} has an encoder and a decoder, and generation on a mesh is for decoders alone; call "
            f"parallel(…) in a loop of your own, {ALONE}"
        )
    kinds = {type(layer) for layer in DynamicCache(config=config.get_text_config(decoder=True)).layers}
    if others := sorted(kind.__name__ for kind in kinds if kind is not DynamicLayer):
        raise TypeError(
            f"{class_of(module)} has a cache of {', '.join(others)}, and generation on a mesh keeps the keys and "
            f"values of all tokens; where the model has windows, switch them off in the config (as with "
            f"sliding_window=None, or layer_types of full_attention), {ALONE}"
        )
    if not kinds:
        raise TypeError(f"{class_of(module)} has no cache of keys and values; call parallel(…) in a loop of your own")
