"""Caches of keys and values, as Hugging Face's models take and return them."""

from __future__ import annotations

import copy
import functools
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from captured import Apply, returned, same
from equality import TOLERANCE, relative
from shared_captures import shared_captures  # noqa: F401
from torch import nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import StaticCache

import autopar
from autopar import CaptureError, Mesh
from autopar.ir.structure import flatten, unflatten

SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=32, max_position_embeddings=64)  # fmt: skip
MODELS: dict[str, Any] = {
    "grows": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "slides": (MistralForCausalLM, MistralConfig(**{**SIZES, "num_hidden_layers": 1}, sliding_window=4)),
}


@functools.cache
def cached(name: str) -> nn.Module:
    kind, config = MODELS[name]
    return kind._from_config(config, attn_implementation="eager").double()


@pytest.mark.long
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # from transformers 5.30 on
@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("passed", "grows"),
        ("returned", "slides"),
        pytest.param("returned", "grows", marks=pytest.mark.sweep("it is there with the model that slides")),
        pytest.param("passed", "slides", marks=pytest.mark.sweep("it is there with the model that grows")),
    ],
)
def test_a_cache_comes_out_and_goes_in(name: str, which: str) -> None:
    """Prefill, then two tokens, each with the cache of the call before. The one passed in is extended, as in eager."""
    model, config = cached(name), MODELS[name][1]
    parallel = autopar.parallelize(model, Mesh(dp=2))
    ids, cache, expected = torch.randint(0, 32, (4, 6)), DynamicCache(config=config), DynamicCache(config=config)
    for _ in range(3):
        outputs = parallel.simulate(ids, past_key_values=cache)
        theirs = model(ids, past_key_values=expected)
        assert theirs.past_key_values is expected and expected.get_seq_length() == cache.get_seq_length()
        for mine in (cache, outputs.past_key_values):
            same(mine, expected)
        assert type(outputs) is type(theirs) and relative(outputs.logits, theirs.logits) <= TOLERANCE
        cache = cache if which == "passed" else outputs.past_key_values
        ids = torch.randint(0, 32, (4, 1))
    assert parallel.captures == 3, "the length is part of the key"
    # newer versions of transformers call the field ``cache``
    assert re.search(r"(past_key_values|cache)=DynamicCache\(layers=\[Dynamic", returned(parallel))


@pytest.mark.long
def test_two_caches_in_one() -> None:
    config = T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=1, num_decoder_layers=2, num_heads=4, vocab_size=32, dropout_rate=0.0
    )
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager").double().eval()
    ids = torch.randint(0, 32, (4, 5))
    call = {"input_ids": ids, "decoder_input_ids": ids}
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=call)
    outputs, theirs = parallel.simulate(**call), model(**call)
    same(outputs.past_key_values, theirs.past_key_values)
    assert "EncoderDecoderCache(self_attention_cache=DynamicCache(" in returned(parallel)
    assert "is_updated={0: True, 1: True})" in returned(parallel)


def filled() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.randn(4, 1, 2, 4).double(), torch.randn(4, 1, 2, 4).double(), 0)
    return cache


def test_a_cache_that_is_changed_and_not_returned() -> None:
    def extends(y: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        keys, values = cache.update(y[:, None, None], y[:, None, None], 0)
        return (keys * values).sum((1, 2))

    cache = filled()
    kept = copy.deepcopy(cache)
    text = (
        r"forward changes its argument cache, a DynamicCache, and does not return it\n  return it, so that its new "
        r"contents are outputs"
    )
    with pytest.raises(CaptureError, match=text):
        autopar.parallelize(
            Apply(extends), Mesh(dp=2), "ddp", example=((torch.randn(4, 4).double(),), {"cache": cache})
        )
    same(cache, kept)


def test_caches_that_are_not_known_stay_closed() -> None:
    """Static ones, which are written in place; and known ones with something else in them."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    ids = torch.randint(0, 32, (4, 6))
    with pytest.raises(CaptureError, match="argument past_key_values is a StaticCache, which capture cannot look into"):
        autopar.parallelize(
            model, Mesh(dp=2), "ddp", example={"input_ids": ids, "past_key_values": StaticCache(model.config, 16)}
        )
    cache = filled()
    cache.stream = object()
    assert flatten(cache)[0] == [cache]


def test_structure_of_a_cache() -> None:
    cache = filled()
    leaves, spec = flatten(cache)
    assert list(spec.paths()) == [("layers", "0", "keys"), ("layers", "0", "values")]
    again = unflatten(leaves, spec)
    same(again, cache)
    assert again is not cache and again.layers[0] is not cache.layers[0]
    empty, subclass = DynamicCache(), type("Mine", (DynamicCache,), {})()
    assert flatten(empty)[1] == flatten(DynamicCache())[1] != flatten(subclass)[1]
    assert isinstance(unflatten(*flatten(subclass)), type(subclass))


def test_autopar_does_not_import_transformers() -> None:
    code = "import sys, autopar; assert 'transformers' not in sys.modules"
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
