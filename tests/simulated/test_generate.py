"""Generation on simulated ranks: the tokens of a single device, whatever the mesh, the model and the options are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from generated import alone, model, prompts

import autopar
from autopar import Mesh
from autopar.ir.nodes import name_of, tensor_type

BOTH = Mesh(dp=2, tp=2)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def on_mesh(parallel: Any, given: dict[str, torch.Tensor], **options: Any) -> Any:
    torch.manual_seed(3)
    return parallel.generate(**given, simulate=True, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "plan", "rows"),
    [
        ("llama", BOTH, "megatron", 4), ("gpt2", BOTH, "megatron", 3), ("llama", Mesh(tp=4), "megatron", 2),
        ("llama", Mesh(dp=4), "ddp", 3), ("llama", Mesh(dp=2), "fsdp", 1), ("gpt2", Mesh(tp=2, dp=1), "megatron+sp", 2),
        ("llama", Mesh(cp=2), None, 2), ("gpt2", Mesh(dp=1), None, 2), ("llama", Mesh(dp=2), "search", 2),
    ],
    ids=str,
)  # fmt: skip
def test_greedy_tokens_are_those_of_a_single_device(name: str, mesh: Mesh, plan: Any, rows: int) -> None:
    """Also with fewer heads or rows than ranks, with a split sequence, with sharded weights, and searched. The scores
    of each token are equal, too, because a model without training repeats itself."""
    parallel = autopar.parallelize(model(name), mesh, plan)
    given, options = prompts(rows), {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    ours, theirs = on_mesh(parallel, given, **options), alone(name, given, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.scores, theirs.scores)
    assert parallel.captures == 2


@pytest.mark.long
def test_sampled_tokens_are_those_of_the_same_seed() -> None:
    parallel = autopar.parallelize(model("llama"), BOTH, "megatron")
    for options in (
        {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 5},
    ):  # fmt: skip
        options = {"max_new_tokens": 6, **options}
        assert torch.equal(on_mesh(parallel, prompts(2), **options), alone("llama", prompts(2), **options))
    assert parallel.captures == 4, "two more for twice as many rows"


@pytest.mark.long
def test_rows_end_at_their_own_end_of_sequence() -> None:
    """The end is a token that some rows have and others have not; ended rows are padded, and all may end early."""
    free = alone("llama", prompts(), **GREEDY)[:, 6:]
    end = next(int(t) for t in free.unique() if 0 < (free == t).any(1).sum() < 4)
    options = {**GREEDY, "eos_token_id": end, "pad_token_id": 0}
    parallel = autopar.parallelize(model("llama"), BOTH, "megatron")
    tokens = on_mesh(parallel, prompts(), **options)
    assert torch.equal(tokens, alone("llama", prompts(), **options)) and (tokens[:, 6:] == 0).any()
    everything = {**options, "eos_token_id": free.unique().tolist()}
    tokens = on_mesh(parallel, prompts(), **everything)
    assert torch.equal(tokens, alone("llama", prompts(), **everything)) and tokens.shape[1] == 7


@pytest.mark.long
def test_captures_do_not_grow_with_the_tokens_and_many_sizes_share_them() -> None:
    parallel = autopar.parallelize(model("llama"), Mesh(tp=2), "megatron", dynamic=True)
    for rows, length, new in ((3, 6, 2), (3, 6, 12), (2, 4, 9), (4, 7, 5)):
        options = {**GREEDY, "max_new_tokens": new}
        given = prompts(rows, length)
        assert torch.equal(on_mesh(parallel, given, **options), alone("llama", given, **options))
        assert parallel.captures == 2


@pytest.mark.long
def test_the_cache_is_in_pieces_and_no_program_gathers_it() -> None:
    parallel = autopar.parallelize(model("llama"), BOTH, "megatron")
    assert parallel.generation is None
    on_mesh(parallel, prompts(), **GREEDY)
    made = parallel.generation
    assert made is not None and made.cache_bytes == 2 * 2 * (4 * 2 * 14 * 4) * 8 // 4, "a quarter of two layers"
    assert str(made) == "keys and values of 2 layers, f64[4/dp 2/tp 14 4], 3,584 bytes on a rank; captures: 2"
    held = [n for n in made.decode.placeholders if name_of(n).startswith("held")]
    assert len(held) == 4 and all(set(tensor_type(n).attr.axes) == {"dp", "tp"} for n in held)
    text = str(made.decode)
    assert text.count(" = all_reduce(") == 5 and " = all_gather(" not in text, "the embedding's, and two in each layer"
    assert [tuple(tensor_type(n).shape) for n in made.prefill.placeholders if name_of(n) == "input_ids"] == [(4, 6)]


def test_a_decoding_step_without_a_mask_sees_the_rows_that_are_there() -> None:
    """Room that holds nothing does not count."""
    from autopar.model.generation.hosts import decoding, prefilling

    llama, ids = model("llama"), torch.randint(1, 22, (2, 6))
    with torch.no_grad():
        _, *rows = prefilling(llama)(ids[:, :5])
        held = [torch.nn.functional.pad(row, (0, 0, 0, 4)) for row in rows]
        logits, *new = decoding(llama)(ids[:, 5:], None, torch.tensor([[5]]), length=torch.tensor(5), held=held)
        torch.testing.assert_close(logits, llama(ids).logits[:, -1:])
    assert [tuple(row.shape) for row in new] == [(2, 2, 1, 4)] * 4


@pytest.mark.long
def test_scores_and_logits_are_returned_and_the_cache_is_not() -> None:
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours = on_mesh(autopar.parallelize(model("gpt2"), BOTH, "megatron"), prompts(), **options)
    theirs = alone("gpt2", prompts(), **options)
    assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.scores, theirs.scores)
    torch.testing.assert_close(ours.logits, theirs.logits)
    assert all(value is None for name, value in ours.items() if name in ("cache", "past_key_values"))


@pytest.mark.long
def test_weights_that_have_changed_count() -> None:
    """Calls and steps of the model go on beside it."""
    changed, ids = model("llama"), prompts()["input_ids"]
    parallel = autopar.parallelize(changed, BOTH, "megatron")
    before = on_mesh(parallel, prompts(), **GREEDY)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=10.0))
    step.simulate(input_ids=ids, labels=ids)
    after = on_mesh(parallel, prompts(), **GREEDY)
    assert torch.equal(after, changed.generate(**prompts(), use_cache=True, **GREEDY))
    assert not torch.equal(before, after)
    torch.testing.assert_close(parallel.simulate(ids).logits, changed(ids).logits)


# -- what is refused -------------------------------------------------------------------------------------------------

ALONE = "or call the model's own generate on a single device"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, f"num_beams=3: beams reorder the cache; leave num_beams at 1, {ALONE}"),
    "assisted": (
        {"prompt_lookup_num_tokens": 2},
        f"prompt_lookup_num_tokens=2: assisted decoding takes tokens back from the cache; leave it out, {ALONE}",
    ),
    "own cache": (
        {"cache_implementation": "static"},
        f"cache_implementation='static': the cache is made on the mesh, in pieces; leave it out, {ALONE}",
    ),
    "no cache": (
        {"use_cache": False},
        "use_cache=False: each token would be another length, and another capture; leave use_cache out",
    ),
    "clock": (
        {"max_time": 1.0},
        "max_time=1.0: the ranks would stop after different numbers of tokens; give max_new_tokens instead",
    ),
    "guidance": (
        {"guidance_scale": 2.0},
        f"guidance_scale=2.0: it calls the model a second time for each token; leave it out, {ALONE}",
    ),
    "attentions": (
        {"output_attentions": True},
        f"output_attentions=True: a decoding step returns logits alone; call parallel(input_ids, …), {ALONE}",
    ),
}


@pytest.fixture(scope="module")
def parallel() -> Any:
    return autopar.parallelize(model("llama"), BOTH, "megatron")


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_is_refused(name: str, parallel: Any) -> None:
    options, text = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(f'generation on a mesh has no {text}')}$"):
        parallel.generate(**prompts(), simulate=True, max_new_tokens=2, **options)


def test_what_the_models_own_config_asks_for_is_refused_too() -> None:
    other = model("llama")
    other.generation_config.num_beams = 2
    with pytest.raises(ValueError, match="has no num_beams=2: beams reorder the cache"):
        autopar.parallelize(other, BOTH, "megatron").generate(**prompts(), simulate=True)


@pytest.mark.long
def test_other_arguments_of_forward_are_refused() -> None:
    text = (
        "generation on a mesh has no token_type_ids: its programs take input_ids, attention_mask, position_ids; leave "
        f"it out, {ALONE}"
    )
    ids = prompts()["input_ids"]
    other = autopar.parallelize(model("gpt2"), BOTH, "megatron")
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        other.generate(**prompts(), token_type_ids=torch.zeros_like(ids), simulate=True, max_new_tokens=2)


def test_a_process_that_is_alone_says_how_to_simulate(parallel: Any) -> None:
    with pytest.raises(RuntimeError, match=r"needs 4 processes.*or call generate\(…, simulate=True\)"):
        parallel.generate(**prompts())


def test_stages_of_a_pipeline_are_refused() -> None:
    text = (
        "the mesh (pp=2 tp=2) has the stages of a pipeline, and generate is not done on stages; load the weights into "
        "a model on a mesh without pp: parallelize(model, Mesh(tp=4))"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        autopar.parallelize(model("llama"), Mesh(pp=2, tp=2), "megatron").generate(**prompts(), simulate=True)


def sliding() -> torch.nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=22, sliding_window=4,
    ))  # fmt: skip


def translating() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=4, vocab_size=22
    ))  # fmt: skip


def adapted() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))


MODELS: dict[str, tuple[Any, str]] = {
    "adapters": (
        adapted,
        "PeftModel has no generate of transformers' GenerationMixin; parallelize a causal language model of "
        "transformers, or write the loop with parallel(…); for adapters, parallelize model.merge_and_unload()",
    ),
    "plain": (
        lambda: torch.nn.Linear(4, 4),
        "Linear has no generate of transformers' GenerationMixin; parallelize a causal language model of transformers, "
        "or write the loop with parallel(…)",
    ),
    "sliding": (
        sliding,
        "MistralForCausalLM has a cache of DynamicSlidingWindowLayer, and generation on a mesh keeps the keys and "
        "values of all tokens; where the model has windows, switch them off in the config (as with "
        "sliding_window=None, or layer_types of full_attention), " + ALONE,
    ),
    "encoder": (
        translating,
        "T5ForConditionalGeneration has an encoder and a decoder, and generation on a mesh is for decoders alone; call "
        "parallel(…) in a loop of your own, " + ALONE,
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of PEFT
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_refused(name: str) -> None:
    make, text = MODELS[name]
    with pytest.raises(TypeError, match=re.escape(text)):
        autopar.parallelize(make(), Mesh(dp=2)).generate(torch.ones(2, 3, dtype=torch.long), simulate=True)


def test_tokens_beyond_the_room_raise() -> None:
    """Where transformers asks for more tokens than the options say, nothing is written beside the cache."""
    from autopar.model.generation import Generation

    short = Generation(autopar.parallelize(model("llama"), Mesh(dp=2), "ddp")._calls)
    short._room = lambda length: length + 1  # type: ignore[method-assign]
    text = "has room for 7 tokens, of which 7 are there; transformers asks for 1 more: give max_new_tokens"
    with pytest.raises(RuntimeError, match=text):
        short.generate(prompts(2)["input_ids"], {"max_new_tokens": 4, "do_sample": False}, True)
