"""Define mixtures of experts of transformers: language models whose tokens choose experts."""

from __future__ import annotations

from zoo import DEPTH, EXPERTS, T5, VOCABULARY, decoder, pair

DEEPSEEK = EXPERTS | {
    "kv_lora_rank": 4,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
}

# the outputs of the experts are reduced when they have been weighted and summed, and so their weights' gradients are
# too
MIXTURES = {
    "mixtral": decoder("MixtralForCausalLM", EXPERTS, block=(2, 3)),
    "mixtral balanced": decoder("MixtralForCausalLM", EXPERTS, output_router_logits=True, block=(2, 3)),
    "qwen2 moe": decoder("Qwen2MoeForCausalLM", EXPERTS, shared_expert_intermediate_size=8, block=(2, 4)),
    "qwen3 moe": decoder("Qwen3MoeForCausalLM", EXPERTS, block=(2, 5)),
    "olmoe": decoder("OlmoeForCausalLM", EXPERTS, block=(4, 5)),
    "phimoe": decoder("PhimoeForCausalLM", EXPERTS, block=(2, 3)),
    "gpt oss": decoder("GptOssForCausalLM", EXPERTS, sliding_window=4, block=(2, 2)),
    "granite moe": decoder("GraniteMoeForCausalLM", EXPERTS, block=(2, 3)),
    "deepseek v2": decoder("DeepseekV2ForCausalLM", DEEPSEEK, n_group=1, topk_method="greedy", block=(2, 5)),
    "deepseek v3": decoder("DeepseekV3ForCausalLM", DEEPSEEK, n_group=2, block=(2, 5)),
    "glm4 moe": decoder(
        "Glm4MoeForCausalLM",
        EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=0,
        block=(2, 3),
    ),
    "ernie4.5 moe": decoder(
        "Ernie4_5_MoeForCausalLM",
        EXPERTS,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
        block=(2, 3),
    ),
    "llama4": decoder(
        "Llama4ForCausalLM", EXPERTS, intermediate_size_mlp=24, attention_chunk_size=4, interleave_moe_layer_step=1
    ),
    "dbrx": decoder(
        "DbrxForCausalLM",
        {
            "d_model": 16,
            "n_heads": 4,
            "n_layers": DEPTH,
            "max_seq_len": 32,
            "vocab_size": VOCABULARY,
            "use_cache": False,
            "pad_token_id": 0,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
        },
    ),
    "switch": pair(
        "SwitchTransformersForConditionalGeneration",
        T5,
        num_experts=4,
        expert_capacity=32,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    "minimax": decoder("MiniMaxForCausalLM", EXPERTS),
    "hunyuan moe": decoder("HunYuanMoEV1ForCausalLM", EXPERTS, moe_topk=2, block=(2, 5)),
    "aria text": decoder(
        "AriaTextForCausalLM", EXPERTS, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, block=(2, 3)
    ),
    "jetmoe": decoder("JetMoeForCausalLM", EXPERTS, kv_channels=4, num_key_value_heads=2),
    "dots1": decoder(
        "Dots1ForCausalLM",
        EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=0,
        block=(2, 5),
    ),
    "flex olmo": decoder("FlexOlmoForCausalLM", EXPERTS, block=(4, 5)),
}
