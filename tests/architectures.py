"""A zoo of models as their libraries have them, with random weights: name → how to make it, and a batch with labels.

Each is small, and in training mode. Dropout is off unless it is asked for: ``ARCHITECTURES["bert"].make(dropout=0.1)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import plain_models
import torch
import transformers
from torch import nn

ROWS, LENGTH, VOCABULARY, SIDE = 8, 8, 24, 16


@dataclass(frozen=True)
class Depth:
    """In a configuration: the number of layers, and so many more."""

    more: int = 0

    def __add__(self, more: int) -> Depth:
        return Depth(self.more + more)


DEPTH = Depth()

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo.

    Attributes:
        model: the class, of transformers or of ``plain_models``.
        config: arguments of its configuration, ``DEPTH`` where it has the number of layers.
        batch: makes the arguments of one call.
        sequence: the inputs whose dim 1 is a sequence, which context parallelism splits.
        block: the all-reduces over tp, forward and backward, that an expert of Megatron has in one layer; ``None`` where
            nobody splits such a layer over tp.
        refused: a piece of the error, where the model is not one static graph.
    """

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[], Batch] = dict
    sequence: tuple[str, ...] = ()
    block: tuple[int, int] | None = (2, 2)
    refused: str = ""

    def make(self, layers: int = 1, dropout: float = 0.0) -> nn.Module:
        """The model in float64 and training mode."""
        torch.manual_seed(0)
        if hasattr(plain_models, self.model):
            model = getattr(plain_models, self.model)(**_deep(self.config, layers))
        else:
            kind = getattr(transformers, self.model)
            config = kind.config_class(**_deep(self.config, layers))
            set_dropout(config, dropout)
            model = kind(config)
            if hasattr(config.get_text_config(), "num_experts_per_tok"):
                model.set_experts_implementation("batched_mm")  # grouped_mm has no fake kernel in float32 and float64
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = dropout
            elif isinstance(getattr(module, "dropout", None), float):  # as of nn.MultiheadAttention
                module.dropout = dropout
        return model.double().train()


def _deep(value: Any, layers: int) -> Any:
    """A configuration with the number of layers filled in, at any depth."""
    if isinstance(value, Mapping):
        return {key: _deep(part, layers) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_deep(part, layers) for part in value)
    return layers + value.more if isinstance(value, Depth) else value


DROPPED = ("dropout", "pdrop", "drop_path", "drop_rate", "layerdrop", "jitter_noise")


def set_dropout(config: Any, probability: float) -> None:
    """Every probability of a configuration, and of those inside; whole layers are never dropped."""
    for one in _configs(config):
        for name, value in list(vars(one).items()):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and any(word in name for word in DROPPED):
                vars(one)[name] = 0.0 if "layerdrop" in name else probability  # past the check of types: some say int


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _configs(value)


def _ids(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length))


def text(**more: Callable[[], torch.Tensor]) -> Batch:
    """Tokens with labels, the last of one row padding."""
    ids, mask = _ids(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    ids = ids.where(mask.bool(), 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100), **{k: make() for k, make in more.items()}}


def unmasked() -> Batch:
    ids = _ids()
    return {"input_ids": ids, "labels": ids.clone()}


def translated() -> Batch:
    """A source and a target."""
    labels = _ids()
    labels[0, -2:] = -100
    given = text()
    return {**given, "labels": labels}


def pixels(side: int = SIDE) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, side, side, dtype=torch.float64)}


def image(side: int = SIDE) -> Batch:
    return {**pixels(side), "labels": torch.randint(3, (ROWS,))}


def classes() -> Batch:
    given = text()
    return {**given, "labels": torch.randint(3, (ROWS,))}


TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CAUSAL = TEXT | {"use_cache": False}
GROUPED = CAUSAL | {"num_key_value_heads": 2, "head_dim": 4}
EXPERTS = GROUPED | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "output_router_logits": False}
GPT = {"n_embd": 16, "n_layer": DEPTH, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 4, "num_channels": 3, "num_labels": 3,
}  # fmt: skip
PAIR = {"d_model": 16, "encoder_layers": DEPTH, "decoder_layers": DEPTH, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": DEPTH, "num_decoder_layers": DEPTH, "num_heads": 4, "vocab_size": VOCABULARY, "use_cache": False,
      "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}  # fmt: skip
AUDIO = {"hidden_size": 16, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 24, "conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": VOCABULARY, "num_labels": 3, "pad_token_id": 0,
         "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "classifier_proj_size": 8, "apply_spec_augment": False}  # fmt: skip
TOKENS = ("input_ids", "attention_mask", "labels")


def decoder(model: str, config: Mapping[str, Any] = GROUPED, block: tuple[int, int] | None = (2, 2), **more: Any) -> Architecture:
    return Architecture(model, {**config, **more}, text, TOKENS, block)


def encoder(model: str, config: Mapping[str, Any] = TEXT, block: tuple[int, int] | None = (2, 2), **more: Any) -> Architecture:
    return Architecture(model, {**config, **more}, text, TOKENS, block)


def pair(model: str, config: Mapping[str, Any] = PAIR, block: tuple[int, int] | None = (5, 5), **more: Any) -> Architecture:
    return Architecture(model, {**config, **more}, translated, TOKENS, block)


def side(config: Mapping[str, Any]) -> int:
    size = config.get("image_size", SIDE)
    return size[0] if isinstance(size, list) else size


def vision(model: str, config: Mapping[str, Any] = VISION, block: tuple[int, int] | None = (2, 2), **more: Any) -> Architecture:
    return Architecture(model, {**config, **more}, functools.partial(image, side(config)), (), block)


def sound(rows: int = ROWS) -> Batch:
    return {"input_values": torch.randn(rows, 64, dtype=torch.float64), "labels": torch.randint(3, (rows,))}


def audio(model: str, config: Mapping[str, Any] = AUDIO, block: tuple[int, int] | None = (2, 2), **more: Any) -> Architecture:
    return Architecture(model, {**config, **more}, sound, (), block)


DECODERS = {
    "llama": decoder("LlamaForCausalLM"),
    "llama tied": decoder("LlamaForCausalLM", tie_word_embeddings=True),
    "llama eager": decoder("LlamaForCausalLM", attn_implementation="eager"),
    "mistral": decoder("MistralForCausalLM", sliding_window=4),
    "ministral": decoder("MinistralForCausalLM", sliding_window=4),
    "qwen2": decoder("Qwen2ForCausalLM"),
    "qwen3": decoder("Qwen3ForCausalLM", block=(2, 4)),
    "gemma": decoder("GemmaForCausalLM"),
    "gemma2": decoder("Gemma2ForCausalLM", query_pre_attn_scalar=4),
    "gemma3": decoder("Gemma3ForCausalLM", query_pre_attn_scalar=4, sliding_window=4, block=(2, 4)),
    "phi": decoder("PhiForCausalLM", CAUSAL, (1, 1), partial_rotary_factor=0.5),
    "phi3": decoder("Phi3ForCausalLM", num_key_value_heads=4),
    "opt": decoder("OPTForCausalLM", CAUSAL, ffn_dim=24, word_embed_proj_dim=16),
    "bloom": decoder("BloomForCausalLM", CAUSAL, n_layer=DEPTH, n_head=4),
    "falcon": decoder("FalconForCausalLM", CAUSAL, (1, 1), alibi=False, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "falcon grouped": decoder("FalconForCausalLM", CAUSAL, (1, 2), alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "gpt2": decoder("GPT2LMHeadModel", GPT),
    "gpt2 eager": decoder("GPT2LMHeadModel", GPT, attn_implementation="eager"),
    "gptj": decoder("GPTJForCausalLM", GPT, (1, 1), rotary_dim=4),
    "gpt neo": decoder("GPTNeoForCausalLM", CAUSAL, num_layers=DEPTH, num_heads=4, attention_types=[[["global"], DEPTH]]),
    "gpt neox": decoder("GPTNeoXForCausalLM", CAUSAL, (1, 2)),
    "gpt bigcode": decoder("GPTBigCodeForCausalLM", GPT),
    "gpt oss": decoder("GptOssForCausalLM", EXPERTS, sliding_window=4),
    "openai gpt": decoder("OpenAIGPTLMHeadModel", GPT),
    "codegen": decoder("CodeGenForCausalLM", GPT, (1, 1), rotary_dim=4),
    "mpt": decoder("MptForCausalLM", {"d_model": 16, "n_heads": 4, "n_layers": DEPTH, "expansion_ratio": 2, "max_seq_len": 32, "vocab_size": VOCABULARY, "use_cache": False}),
    "stablelm": decoder("StableLmForCausalLM"),
    "olmo": decoder("OlmoForCausalLM"),
    "olmo2": decoder("Olmo2ForCausalLM", block=(4, 4)),
    "olmo3": decoder("Olmo3ForCausalLM", sliding_window=4, block=(4, 4)),
    "cohere": decoder("CohereForCausalLM", block=(1, 1)),
    "cohere2": decoder("Cohere2ForCausalLM", block=(1, 1), sliding_window=4),
    "granite": decoder("GraniteForCausalLM"),
    "glm": decoder("GlmForCausalLM"),
    "glm4": decoder("Glm4ForCausalLM"),
    "smollm3": decoder("SmolLM3ForCausalLM"),
    "starcoder2": decoder("Starcoder2ForCausalLM"),
    "nemotron": decoder("NemotronForCausalLM"),
    "persimmon": decoder("PersimmonForCausalLM", CAUSAL, block=(2, 6)),
    "helium": decoder("HeliumForCausalLM"),
    "arcee": decoder("ArceeForCausalLM"),
    "ernie4.5": decoder("Ernie4_5ForCausalLM"),
    "exaone4": decoder("Exaone4ForCausalLM", sliding_window=4, sliding_window_pattern=1, block=(2, 4)),
    "seed oss": decoder("SeedOssForCausalLM"),
    "apertus": decoder("ApertusForCausalLM", block=(2, 6)),
    "diffllama": decoder("DiffLlamaForCausalLM"),
    "modernbert decoder": decoder("ModernBertDecoderForCausalLM", CAUSAL, local_attention=4),
    "biogpt": decoder("BioGptForCausalLM", CAUSAL),
    "xglm": decoder("XGLMForCausalLM", CAUSAL, d_model=16, num_layers=DEPTH, attention_heads=4, ffn_dim=24),
    "ctrl": decoder("CTRLLMHeadModel", GPT, dff=24),
    "bart decoder": decoder("BartForCausalLM", PAIR),
    "doge": decoder("DogeForCausalLM", CAUSAL),
    "bitnet": decoder("BitNetForCausalLM", block=(4, 4)),
    "nanochat": decoder("NanoChatForCausalLM", GROUPED),
}

MIXTURES = {
    "mixtral": decoder("MixtralForCausalLM", EXPERTS),
    "mixtral balanced": decoder("MixtralForCausalLM", EXPERTS, output_router_logits=True),
    "qwen2 moe": decoder("Qwen2MoeForCausalLM", EXPERTS, shared_expert_intermediate_size=8),
    "qwen3 moe": decoder("Qwen3MoeForCausalLM", EXPERTS, block=(2, 4)),
    "olmoe": decoder("OlmoeForCausalLM", EXPERTS, block=(4, 4)),
    "phimoe": decoder("PhimoeForCausalLM", EXPERTS),
    "granite moe": decoder("GraniteMoeForCausalLM", EXPERTS),
    "deepseek v2": decoder("DeepseekV2ForCausalLM", EXPERTS, kv_lora_rank=4, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4, n_group=1,
                           topk_group=1, topk_method="greedy", n_shared_experts=1, first_k_dense_replace=0, num_key_value_heads=4, block=(2, 4)),
    "deepseek v3": decoder("DeepseekV3ForCausalLM", EXPERTS, kv_lora_rank=4, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4, n_group=2,
                           topk_group=1, n_shared_experts=1, first_k_dense_replace=0, num_key_value_heads=4, block=(2, 4)),
    "glm4 moe": decoder("Glm4MoeForCausalLM", EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=0),
    "ernie4.5 moe": decoder("Ernie4_5_MoeForCausalLM", EXPERTS, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=0),
    "llama4": decoder("Llama4ForCausalLM", EXPERTS, intermediate_size_mlp=24, attention_chunk_size=4, interleave_moe_layer_step=1),
    "dbrx": decoder("DbrxForCausalLM", {"d_model": 16, "n_heads": 4, "n_layers": DEPTH, "max_seq_len": 32, "vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0,
                    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16}}),
    "switch": pair("SwitchTransformersForConditionalGeneration", T5, num_experts=4, expert_capacity=32, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    "minimax": decoder("MiniMaxForCausalLM", EXPERTS),
    "hunyuan moe": decoder("HunYuanMoEV1ForCausalLM", EXPERTS, moe_topk=2, block=(2, 4)),
    "lfm2": decoder("Lfm2ForCausalLM", CAUSAL, None, num_key_value_heads=2, block_ff_dim=24, block_multiple_of=8, full_attn_idxs=[0], layer_types=None),
    "aria text": decoder("AriaTextForCausalLM", EXPERTS, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "jetmoe": decoder("JetMoeForCausalLM", EXPERTS, kv_channels=4, num_key_value_heads=2),
    "dots1": decoder("Dots1ForCausalLM", EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=0, block=(2, 4)),
    "flex olmo": decoder("FlexOlmoForCausalLM", EXPERTS, block=(4, 4)),
}

STATE_SPACES = {
    "mamba": decoder("MambaForCausalLM", CAUSAL, None, state_size=4, conv_kernel=3, time_step_rank=2, expand=2),
    "mamba2": decoder("Mamba2ForCausalLM", CAUSAL, None, state_size=4, conv_kernel=3, expand=2, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    "falcon mamba": decoder("FalconMambaForCausalLM", CAUSAL, None, state_size=4, conv_kernel=3, time_step_rank=2, expand=2),
    "rwkv": Architecture("RwkvForCausalLM", {"hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": DEPTH + 1, "vocab_size": VOCABULARY,
                         "context_length": 32, "use_cache": False}, text, TOKENS, None),
    "recurrent gemma": decoder("RecurrentGemmaForCausalLM", GROUPED, None, lru_width=16, attention_window_size=4, conv1d_width=3, block_types=["recurrent"]),
    "jamba": decoder("JambaForCausalLM", EXPERTS, None, mamba_d_state=4, mamba_d_conv=3, mamba_expand=2, mamba_dt_rank=2, attn_layer_period=2, attn_layer_offset=1,
                     expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False),
    "bamba": decoder("BambaForCausalLM", GROUPED, None, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4, mamba_d_conv=3, mamba_expand=2, mamba_chunk_size=4,
                     attn_layer_indices=[]),
    "qwen3 next": decoder("Qwen3NextForCausalLM", EXPERTS, None, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=4,
                          shared_expert_intermediate_size=8, linear_conv_kernel_dim=3),
    "xlstm": decoder("xLSTMForCausalLM", CAUSAL, None, num_heads=4, chunk_size=4),
    "nemotron h": decoder("NemotronHForCausalLM", GROUPED, None, hybrid_override_pattern="M-", mamba_num_heads=4, mamba_head_dim=8, n_groups=1, ssm_state_size=4, chunk_size=4),
    "zamba2": decoder("Zamba2ForCausalLM", GROUPED, None, mamba_d_state=4, mamba_d_conv=3, n_mamba_heads=4, mamba_headdim=8, chunk_size=4, layers_block_type=["mamba"]),
}

ENCODERS = {
    "bert": encoder("BertForMaskedLM"),
    "bert eager": encoder("BertForMaskedLM", attn_implementation="eager"),
    "roberta": encoder("RobertaForMaskedLM"),
    "xlm roberta": encoder("XLMRobertaForMaskedLM"),
    "camembert": encoder("CamembertForMaskedLM"),
    "roberta prelayernorm": encoder("RobertaPreLayerNormForMaskedLM"),
    "data2vec text": encoder("Data2VecTextForMaskedLM"),
    "albert": encoder("AlbertForMaskedLM", embedding_size=8),
    "electra": encoder("ElectraForMaskedLM", embedding_size=8),
    "distilbert": encoder("DistilBertForMaskedLM", {"dim": 16, "hidden_dim": 24, "n_layers": DEPTH, "n_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32}),
    "deberta": encoder("DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta v2": encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4),
    "modernbert": encoder("ModernBertForMaskedLM", local_attention=4),
    "mpnet": encoder("MPNetForMaskedLM"),
    "mobilebert": encoder("MobileBertForMaskedLM", intra_bottleneck_size=8, embedding_size=8, true_hidden_size=8, block=(5, 6)),
    "squeezebert": encoder("SqueezeBertForMaskedLM", embedding_size=16, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2),
    "megatron bert": encoder("MegatronBertForMaskedLM"),
    "rembert": encoder("RemBertForMaskedLM", input_embedding_size=8, output_embedding_size=8),
    "ernie": encoder("ErnieForMaskedLM"),
    "esm": encoder("EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=3, token_dropout=False),
    "fnet": Architecture("FNetForMaskedLM", TEXT, unmasked, ("input_ids", "labels"), None),
    "funnel": encoder("FunnelForMaskedLM", {"d_model": 16, "n_head": 4, "d_head": 4, "d_inner": 24, "block_sizes": [1, 1], "num_decoder_layers": 1, "vocab_size": VOCABULARY}, None),
    "roformer": encoder("RoFormerForMaskedLM", embedding_size=16),
    "convbert": encoder("ConvBertForMaskedLM", embedding_size=16, head_ratio=2, conv_kernel_size=3, num_groups=1),
    "xlnet": encoder("XLNetLMHeadModel", {"d_model": 16, "n_layer": DEPTH, "n_head": 4, "d_inner": 24, "vocab_size": VOCABULARY, "use_mems_train": False}),
    "xlm": encoder("XLMWithLMHeadModel", {"emb_dim": 16, "n_layers": DEPTH, "n_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_index": 0}),
    "flaubert": encoder("FlaubertWithLMHeadModel", {"emb_dim": 16, "n_layers": DEPTH, "n_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_index": 0}),
    "longformer": encoder("LongformerForMaskedLM", attention_window=4),
    "big bird": encoder("BigBirdForMaskedLM", block_size=2, num_random_blocks=1),
    "big bird full": encoder("BigBirdForMaskedLM", attention_type="original_full"),
    "reformer": encoder("ReformerForMaskedLM", TEXT | {"is_decoder": False}, None, attention_head_size=4, axial_pos_embds=False, attn_layers=["local"], local_attn_chunk_length=4,
                        feed_forward_size=24),
    "perceiver": Architecture("PerceiverForMaskedLM", {"d_model": 16, "num_latents": 4, "d_latents": 16, "num_blocks": 1, "num_self_attends_per_block": DEPTH,
                              "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 16, "v_channels": 16, "vocab_size": VOCABULARY,
                              "max_position_embeddings": LENGTH}, text, ()),
    "canine": Architecture("CanineForSequenceClassification", TEXT | {"num_hash_buckets": 16, "num_hash_functions": 2, "downsampling_rate": 2, "local_transformer_stride": 4,
                           "num_labels": 3}, classes, ()),
    "layoutlm": encoder("LayoutLMForMaskedLM"),
    "lilt": Architecture("LiltForSequenceClassification", TEXT | {"hidden_size": 24, "channel_shrink_ratio": 2, "num_labels": 3}, classes, (), block=(4, 4)),
    "ibert": encoder("IBertForMaskedLM"),
    "mra": encoder("MraForMaskedLM"),
    "yoso": encoder("YosoForMaskedLM", use_expectation=True),
    "nomic bert": encoder("NomicBertForMaskedLM"),
    "eurobert": encoder("EuroBertForMaskedLM"),
    "splinter": Architecture("SplinterForQuestionAnswering", TEXT, lambda: {k: v for k, v in text().items() if k != "labels"} | {
        "start_positions": torch.randint(LENGTH, (ROWS,)), "end_positions": torch.randint(LENGTH, (ROWS,))}, ()),
    "bert classes": Architecture("BertForSequenceClassification", TEXT | {"num_labels": 3}, classes, ()),
    "bert questions": Architecture("BertForQuestionAnswering", TEXT, lambda: {k: v for k, v in text().items() if k != "labels"} | {
        "start_positions": torch.randint(LENGTH, (ROWS,)), "end_positions": torch.randint(LENGTH, (ROWS,))}, ()),
    "llama classes": Architecture("LlamaForSequenceClassification", GROUPED | {"num_labels": 3}, classes, ()),
}

PAIRS = {
    "t5": pair("T5ForConditionalGeneration", T5),
    "t5 gated": pair("T5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": pair("MT5ForConditionalGeneration", T5),
    "umt5": pair("UMT5ForConditionalGeneration", T5),
    "longt5": pair("LongT5ForConditionalGeneration", T5, local_radius=3, global_block_size=2),
    "bart": pair("BartForConditionalGeneration"),
    "mbart": pair("MBartForConditionalGeneration"),
    "pegasus": pair("PegasusForConditionalGeneration"),
    "pegasus x": pair("PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2, stagger_local_blocks=False, block=(7, 7)),
    "marian": pair("MarianMTModel"),
    "m2m": pair("M2M100ForConditionalGeneration"),
    "blenderbot": pair("BlenderbotForConditionalGeneration"),
    "blenderbot small": pair("BlenderbotSmallForConditionalGeneration"),
    "led": pair("LEDForConditionalGeneration", attention_window=4, max_encoder_position_embeddings=32, max_decoder_position_embeddings=32),
    "plbart": pair("PLBartForConditionalGeneration"),
    "mvp": pair("MvpForConditionalGeneration"),
    "fsmt": Architecture("FSMTForConditionalGeneration", PAIR | {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["a", "b"]}, unmasked, ("input_ids", "labels"), (5, 5)),
    "prophetnet": pair("ProphetNetForConditionalGeneration", {"hidden_size": 16, "num_encoder_layers": DEPTH, "num_decoder_layers": DEPTH, "num_encoder_attention_heads": 4,
                       "num_decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "ngram": 2,
                       "num_buckets": 8, "relative_max_distance": 16, "use_cache": False, "decoder_start_token_id": 0}),
    "nllb moe": pair("NllbMoeForConditionalGeneration", num_experts=4, expert_capacity=32, encoder_sparse_step=1, decoder_sparse_step=1),
    "bigbird pegasus": pair("BigBirdPegasusForConditionalGeneration", attention_type="original_full"),
    "t5gemma": pair("T5GemmaForConditionalGeneration", {"encoder": {k: v for k, v in GROUPED.items() if k != "use_cache"}, "decoder": GROUPED, "vocab_size": VOCABULARY}),
    "moonshine": Architecture("MoonshineForConditionalGeneration", CAUSAL | {"encoder_num_hidden_layers": DEPTH, "decoder_num_hidden_layers": DEPTH, "encoder_num_attention_heads": 4,
                              "decoder_num_attention_heads": 4, "decoder_start_token_id": 1}, lambda: {"input_values": torch.randn(ROWS, 4000, dtype=torch.float64), "labels": _ids()}, (), (5, 5)),
    "whisper": Architecture("WhisperForConditionalGeneration", PAIR | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "suppress_tokens": None, "begin_suppress_tokens": None},
                            lambda: {"input_features": torch.randn(ROWS, 8, 16, dtype=torch.float64), "labels": _ids()}, (), (5, 5)),
    "speech to text": Architecture("Speech2TextForConditionalGeneration", PAIR | {"input_feat_per_channel": 8, "num_conv_layers": 1, "conv_kernel_sizes": (3,), "conv_channels": 16,
                                   "max_source_positions": 32, "max_target_positions": 16},
                                   lambda: {"input_features": torch.randn(ROWS, 16, 8, dtype=torch.float64), "labels": _ids()}, (), (5, 5)),
}

VISIONS = {
    "vit": vision("ViTForImageClassification"),
    "vit eager": vision("ViTForImageClassification", attn_implementation="eager"),
    "deit": vision("DeiTForImageClassification"),
    "beit": vision("BeitForImageClassification", use_relative_position_bias=True, use_mask_token=False),
    "dinov2": vision("Dinov2ForImageClassification", mlp_ratio=2),
    "dinov2 registers": vision("Dinov2WithRegistersForImageClassification", mlp_ratio=2, num_register_tokens=2),
    "dinov3": Architecture("DINOv3ViTModel", VISION | {"num_register_tokens": 2, "pos_embed_rescale": None}, pixels),
    "ijepa": vision("IJepaForImageClassification"),
    "vit msn": vision("ViTMSNForImageClassification"),
    "vit mae": Architecture("ViTMAEForPreTraining", VISION | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 24},
                            lambda: {**pixels(), "noise": torch.rand(ROWS, 16, dtype=torch.float64)}),
    "siglip vision": vision("SiglipForImageClassification", {"vision_config": VISION, "num_labels": 3}),
    "yolos": Architecture("YolosModel", VISION | {"image_size": [SIDE, SIDE], "num_detection_tokens": 2}, pixels),
    "vivit": Architecture("VivitForVideoClassification", VISION | {"num_frames": 4, "tubelet_size": [2, 4, 4]},
                          lambda: {"pixel_values": torch.randn(ROWS, 4, 3, SIDE, SIDE, dtype=torch.float64), "labels": torch.randint(3, (ROWS,))}),
    "videomae": Architecture("VideoMAEForVideoClassification", VISION | {"num_frames": 4, "tubelet_size": 2},
                             lambda: {"pixel_values": torch.randn(ROWS, 4, 3, SIDE, SIDE, dtype=torch.float64), "labels": torch.randint(3, (ROWS,))}),
    "timesformer": Architecture("TimesformerForVideoClassification", VISION | {"num_frames": 4},
                                lambda: {"pixel_values": torch.randn(ROWS, 4, 3, SIDE, SIDE, dtype=torch.float64), "labels": torch.randint(3, (ROWS,))}, (), (3, 3)),
    "swin": vision("SwinForImageClassification", {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [DEPTH, DEPTH], "num_heads": [2, 4], "window_size": 2, "num_labels": 3}, (4, 4)),
    "swin v2": vision("Swinv2ForImageClassification", {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [DEPTH, DEPTH], "num_heads": [2, 4], "window_size": 2, "num_labels": 3}, (4, 4)),
    "convnext": vision("ConvNextForImageClassification", {"depths": [DEPTH, DEPTH], "hidden_sizes": [8, 16], "num_stages": 2, "patch_size": 2, "num_labels": 3}, None),
    "convnext v2": vision("ConvNextV2ForImageClassification", {"depths": [DEPTH, DEPTH], "hidden_sizes": [8, 16], "num_stages": 2, "patch_size": 2, "num_labels": 3}, None),
    "resnet": vision("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "num_labels": 3}, None),
    "resnet basic": vision("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "layer_type": "basic", "num_labels": 3}, None),
    "regnet": vision("RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "groups_width": 4, "num_labels": 3}, None),
    "mobilenet v1": vision("MobileNetV1ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4, "num_labels": 3}, None),
    "mobilenet v2": vision("MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4, "num_labels": 3}, None),
    "efficientnet": vision("EfficientNetForImageClassification", {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "num_labels": 3}, None),
    "mobilevit": vision("MobileViTForImageClassification", {"image_size": 32, "hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8], "num_attention_heads": 4, "num_labels": 3}, None),
    "segformer": Architecture("SegformerForSemanticSegmentation", {"num_encoder_blocks": 2, "depths": [DEPTH, DEPTH], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
                              "strides": [2, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 8, "num_labels": 3},
                              lambda: {**pixels(), "labels": torch.randint(3, (ROWS, SIDE, SIDE))}, (), (4, 4)),
    "poolformer": vision("PoolFormerForImageClassification", {"depths": [DEPTH, DEPTH], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2],
                         "padding": [1, 1], "mlp_ratio": 2.0, "num_labels": 3}, None),
    "pvt": vision("PvtForImageClassification", {"image_size": 32, "depths": [DEPTH] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4], "num_labels": 3}, None),
    "levit": vision("LevitForImageClassification", {"image_size": 64, "hidden_sizes": [8, 16, 16], "num_attention_heads": [2, 4, 4], "depths": [DEPTH] * 3, "key_dim": [4, 4, 4], "num_labels": 3}, None),
    "focalnet": vision("FocalNetForImageClassification", {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "focal_levels": [1, 1],
                       "focal_windows": [3, 3], "num_labels": 3}, None),
    "bit": vision("BitForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "num_groups": 4, "num_labels": 3}, None),
    "cvt": vision("CvtForImageClassification", {"patch_sizes": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "embed_dim": [8, 16], "num_heads": [1, 2], "depth": [DEPTH + 1, DEPTH + 1],
                  "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
                  "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1], "num_labels": 3}, None),
    "swiftformer": vision("SwiftFormerForImageClassification", {"image_size": 32, "depths": [DEPTH] * 4, "embed_dims": [8, 8, 16, 16], "num_labels": 3}, None),
    "hiera": vision("HieraForImageClassification", {"image_size": [SIDE, SIDE], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "embed_dim": 8, "depths": [DEPTH, DEPTH],
                    "num_heads": [2, 4], "query_stride": [2, 2], "num_query_pool": 1, "masked_unit_size": [2, 2], "masked_unit_attention": [True, False], "mlp_ratio": 2.0, "num_labels": 3}, (4, 4)),
    "imagegpt": Architecture("ImageGPTForCausalImageModeling", {k: v for k, v in GPT.items() if k not in ("pad_token_id", "bos_token_id", "eos_token_id")}, lambda: {"input_ids": _ids().clamp_max(22), "labels": _ids().clamp_max(22)}, ("input_ids", "labels")),
    "dpt": Architecture("DPTForDepthEstimation", VISION | {"num_hidden_layers": DEPTH + 3, "backbone_out_indices": [0, 1, 2, DEPTH + 2], "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5],
                        "is_hybrid": False}, pixels),
    "sam vision": Architecture("SamVisionModel", VISION | {"output_channels": 8, "window_size": 2, "global_attn_indexes": [], "num_pos_feats": 4}, pixels, block=(2, 4)),
    "mgp": Architecture("MgpstrForSceneTextRecognition", {"image_size": [SIDE, SIDE], "patch_size": 4, "hidden_size": 16, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "mlp_ratio": 2.0,
                        "num_character_labels": 5, "num_bpe_labels": 5, "num_wordpiece_labels": 5, "max_token_length": 4}, pixels),
}

AUDIOS = {
    "wav2vec2": audio("Wav2Vec2ForSequenceClassification"),
    "wav2vec2 ctc": Architecture("Wav2Vec2ForCTC", AUDIO | {"ctc_loss_reduction": "mean"}, lambda: {"input_values": torch.randn(ROWS, 64, dtype=torch.float64), "labels": torch.randint(1, VOCABULARY, (ROWS, 3))}),
    "hubert": audio("HubertForSequenceClassification"),
    "wavlm": audio("WavLMForSequenceClassification", num_buckets=8, max_bucket_distance=16),
    "unispeech": audio("UniSpeechForSequenceClassification"),
    "sew": audio("SEWForSequenceClassification", squeeze_factor=1),
    "data2vec audio": audio("Data2VecAudioForSequenceClassification"),
    "wav2vec2 conformer": audio("Wav2Vec2ConformerForSequenceClassification", conv_depthwise_kernel_size=3, block=(3, 3)),
    "wav2vec2 bert": Architecture("Wav2Vec2BertForSequenceClassification", AUDIO | {"feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "position_embeddings_type": "relative"},
                                  lambda: {"input_features": torch.randn(ROWS, 16, 8, dtype=torch.float64), "labels": torch.randint(3, (ROWS,))}, block=(3, 3)),
    "ast": Architecture("ASTForAudioClassification", VISION | {"num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4},
                        lambda: {"input_values": torch.randn(ROWS, 16, 8, dtype=torch.float64), "labels": torch.randint(3, (ROWS,))}),
    "encodec": Architecture("EncodecModel", {"num_filters": 4, "hidden_size": 8, "codebook_size": 8, "num_lstm_layers": 1}, lambda: {"input_values": torch.randn(ROWS, 1, 640, dtype=torch.float64)}, (), None),
}

VISION_INSIDE = {key: value for key, value in VISION.items() if key != "num_labels"}


def captioned() -> Batch:
    return {**{k: v for k, v in text().items() if k != "labels"}, **pixels(), "return_loss": True}  # type: ignore[dict-item]


def with_image_tokens(count: int = 16) -> Batch:
    """An image in place of the first tokens."""
    given = text()
    ids = torch.cat([torch.full((ROWS, count), 23), given["input_ids"].clamp_max(22)], dim=1)
    labels = torch.cat([torch.full((ROWS, count), -100), given["labels"].clamp_max(22)], dim=1)
    return {"input_ids": ids, "labels": labels, **pixels()}


def _two(model: str, **more: Any) -> Architecture:
    return Architecture(model, {"text_config": {**TEXT, "projection_dim": 8}, "vision_config": {**VISION_INSIDE, "projection_dim": 8}, "projection_dim": 8, **more}, captioned, (), (4, 4))


MULTIMODAL = {
    "clip": _two("CLIPModel"),
    "siglip": _two("SiglipModel"),
    "chinese clip": _two("ChineseCLIPModel"),
    "blip": Architecture("BlipForConditionalGeneration", {"text_config": {**TEXT, "encoder_hidden_size": 16, "use_cache": False}, "vision_config": VISION_INSIDE, "image_text_hidden_size": 8},
                         lambda: {**text(), **pixels()}, (), (5, 5)),
    "llava": Architecture("LlavaForConditionalGeneration", {"text_config": {"model_type": "llama", **GROUPED}, "vision_config": {"model_type": "clip_vision_model", **VISION_INSIDE, "projection_dim": 8},
                          "image_token_index": 23, "image_token_id": 23, "vision_feature_layer": -1, "image_seq_length": 16}, with_image_tokens, (), (4, 4)),
    "git": Architecture("GitForCausalLM", {**CAUSAL, "vision_config": VISION_INSIDE}, lambda: {**text(), **pixels()}, (), (4, 4)),
    "vilt": Architecture("ViltForQuestionAnswering", TEXT | {"image_size": SIDE, "patch_size": 4, "max_image_length": -1, "num_labels": 3},
                         lambda: {**{k: v for k, v in text().items() if k != "labels"}, **pixels(), "labels": torch.rand(ROWS, 3, dtype=torch.float64)}),
    "paligemma": Architecture("PaliGemmaForConditionalGeneration", {"text_config": {"model_type": "gemma", **GROUPED}, "vision_config": {"model_type": "siglip_vision_model", **VISION_INSIDE},
                              "image_token_index": 23, "projection_dim": 16}, lambda: {**with_image_tokens(), "token_type_ids": torch.ones(ROWS, 24, dtype=torch.long)}, (), (4, 4)),
    "idefics3": Architecture("Idefics3ForConditionalGeneration", {"text_config": {"model_type": "llama", **GROUPED}, "vision_config": VISION_INSIDE, "image_token_id": 23, "scale_factor": 2},
                             lambda: {**with_image_tokens(4), "pixel_values": torch.randn(ROWS, 1, 3, SIDE, SIDE, dtype=torch.float64)}, (), (4, 4)),
    "visual bert": Architecture("VisualBertForQuestionAnswering", TEXT | {"visual_embedding_dim": 8, "num_labels": 3},
                                lambda: {**{k: v for k, v in text().items() if k != "labels"}, "visual_embeds": torch.randn(ROWS, 4, 8, dtype=torch.float64),
                                         "visual_attention_mask": torch.ones(ROWS, 4), "labels": torch.rand(ROWS, 3, dtype=torch.float64)}),
    "lxmert": Architecture("LxmertModel", TEXT | {"l_layers": DEPTH, "x_layers": DEPTH, "r_layers": DEPTH, "visual_feat_dim": 8},
                           lambda: {**{k: v for k, v in text().items() if k != "labels"}, "visual_feats": torch.randn(ROWS, 4, 8, dtype=torch.float64), "visual_pos": torch.rand(ROWS, 4, 4, dtype=torch.float64)}, (), None),
    "trocr": decoder("TrOCRForCausalLM", {**PAIR, "cross_attention_hidden_size": 16}),
    "kosmos2 text": Architecture("Kosmos2Model", {"text_config": {"embed_dim": 16, "layers": DEPTH, "ffn_dim": 24, "attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
                                 "vision_config": VISION_INSIDE, "latent_query_num": 4}, lambda: {"pixel_values": pixels()["pixel_values"], "input_ids": _ids(), "image_embeds_position_mask":
                                 torch.tensor([[1] * 4 + [0] * (LENGTH - 4)] * ROWS)}, (), (4, 4)),
    "qwen2 vl text": Architecture("Qwen2VLForConditionalGeneration", {"text_config": {**GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}}, "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 4}}, text, TOKENS),
}

SERIES = {
    "time series": Architecture("TimeSeriesTransformerForPrediction", {"prediction_length": 4, "context_length": 4, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16,
                                "encoder_layers": DEPTH, "decoder_layers": DEPTH, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
                                "num_parallel_samples": 2},
                                lambda: {"past_values": torch.randn(ROWS, 6, dtype=torch.float64), "past_time_features": torch.randn(ROWS, 6, 2, dtype=torch.float64),
                                         "past_observed_mask": torch.ones(ROWS, 6), "future_values": torch.randn(ROWS, 4, dtype=torch.float64),
                                         "future_time_features": torch.randn(ROWS, 4, 2, dtype=torch.float64)}, (), (5, 5)),
    "patchtst": Architecture("PatchTSTForPrediction", {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16, "num_hidden_layers": DEPTH,
                             "num_attention_heads": 4, "ffn_dim": 24, "prediction_length": 4, "loss": "mse"},
                             lambda: {"past_values": torch.randn(ROWS, 16, 2, dtype=torch.float64), "future_values": torch.randn(ROWS, 4, 2, dtype=torch.float64)}),
    "patchtsmixer": Architecture("PatchTSMixerForPrediction", {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16, "num_layers": DEPTH, "prediction_length": 4},
                                 lambda: {"past_values": torch.randn(ROWS, 16, 2, dtype=torch.float64), "future_values": torch.randn(ROWS, 4, 2, dtype=torch.float64)}, (), None),
    "informer": Architecture("InformerForPrediction", {"prediction_length": 4, "context_length": 4, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16, "encoder_layers": DEPTH,
                             "decoder_layers": DEPTH, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_parallel_samples": 2},
                             lambda: {"past_values": torch.randn(ROWS, 6, dtype=torch.float64), "past_time_features": torch.randn(ROWS, 6, 2, dtype=torch.float64),
                                      "past_observed_mask": torch.ones(ROWS, 6), "future_values": torch.randn(ROWS, 4, dtype=torch.float64),
                                      "future_time_features": torch.randn(ROWS, 4, 2, dtype=torch.float64)}, (), (5, 5)),
    "autoformer": Architecture("AutoformerForPrediction", {"prediction_length": 4, "context_length": 4, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16, "encoder_layers": DEPTH,
                               "decoder_layers": DEPTH, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "label_length": 2,
                               "moving_average": 3, "num_parallel_samples": 2},
                               lambda: {"past_values": torch.randn(ROWS, 6, dtype=torch.float64), "past_time_features": torch.randn(ROWS, 6, 2, dtype=torch.float64),
                                        "past_observed_mask": torch.ones(ROWS, 6), "future_values": torch.randn(ROWS, 4, dtype=torch.float64),
                                        "future_time_features": torch.randn(ROWS, 4, 2, dtype=torch.float64)}, (), (5, 5)),
    "decision transformer": Architecture("DecisionTransformerModel", {"state_dim": 3, "act_dim": 2, "hidden_size": 16, "max_ep_len": 16, "n_layer": DEPTH, "n_head": 4, "n_positions": 32},
                                         lambda: {"states": torch.randn(ROWS, 4, 3, dtype=torch.float64), "actions": torch.randn(ROWS, 4, 2, dtype=torch.float64),
                                                  "rewards": torch.randn(ROWS, 4, 1, dtype=torch.float64), "returns_to_go": torch.randn(ROWS, 4, 1, dtype=torch.float64),
                                                  "timesteps": torch.arange(4).expand(ROWS, 4).clone(), "attention_mask": torch.ones(ROWS, 4)}, (), (2, 2)),
}

def _real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


PLAIN = {
    "nn.Transformer": Architecture("Translator", {"layers": DEPTH}, lambda: {"source": text()["input_ids"], "target": _ids()}, (), (5, 5)),
    "lstm": Architecture("Recurrent", {"kind": "LSTM", "layers": DEPTH}, lambda: {"ids": _ids()}, (), None),
    "lstm both ways": Architecture("Recurrent", {"kind": "LSTM", "layers": DEPTH, "both": True}, lambda: {"ids": _ids()}, (), None),
    "gru": Architecture("Recurrent", {"kind": "GRU", "layers": DEPTH}, lambda: {"ids": _ids()}, (), None),
    "unet": Architecture("UNet", {}, lambda: {"image": _real(ROWS, 3, 8, 8), "labels": torch.randint(3, (ROWS, 8, 8))}, (), None),
    "denoiser": Architecture("Denoiser", {}, lambda: {"noisy": _real(ROWS, 3, 4, 4), "step": torch.randint(100, (ROWS,)), "noise": _real(ROWS, 3, 4, 4)}, (), None),
    "dcgan": Architecture("Generative", {}, lambda: {"latent": _real(ROWS, 6), "real": _real(ROWS, 3, 8, 8)}, (), None),
    "mlp mixer": Architecture("Mixer", {"layers": DEPTH}, lambda: {"image": _real(ROWS, 3, SIDE, SIDE), "labels": torch.randint(3, (ROWS,))}, (), None),
    "dlrm": Architecture("Clicks", {}, lambda: {"dense": _real(ROWS, 5), "categories": torch.randint(10, (ROWS, 3, 2)), "clicked": torch.rand(ROWS, dtype=torch.float64)}, (), None),
    "gcn": Architecture("GraphConvolution", {}, lambda: {"nodes": _real(12, 5), "edges": torch.randint(12, (2, 30)), "labels": torch.randint(3, (12,))}, (), None),
    "vae": Architecture("Autoencoder", {}, lambda: {"x": _real(ROWS, 12), "noise": _real(ROWS, 4)}, (), None),
}

ARCHITECTURES = PLAIN | DECODERS | MIXTURES | STATE_SPACES | ENCODERS | PAIRS | VISIONS | AUDIOS | MULTIMODAL | SERIES
