"""Train LoRA adapters of PEFT in a Llama whose layers are sharded; the base stays frozen.

    python -m autopar.examples.peft_lora
    torchrun --nproc-per-node 4 -m autopar.examples.peft_lora

``get_peft_model`` comes before ``parallelize``, and a preset splits each adapter as the layer that it belongs to.
Afterwards the layers are in pieces, and PEFT is refused. ``save_pretrained`` writes the adapters alone, as PEFT does.
"""

import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks, shared_folder, train_alone

MESH = autopar.Mesh(dp=2, tp=2)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4
}  # fmt: skip
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def adapted() -> PeftModel:
    return get_peft_model(base(), LoraConfig(**LORA))


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (4, 16), generator=generator) for _ in range(count)]


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def main() -> None:
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT reads it
    parallel = autopar.parallelize(adapted(), MESH, "megatron")
    frozen = {name: p.full_tensor() for name, p in parallel.named_parameters() if not p.requires_grad}
    step = parallel.train_step(torch.optim.AdamW(trainable(parallel), lr=1e-2))
    ours = [step(input_ids=ids, labels=ids).item() for ids in batches(4)]
    for name, weight in frozen.items():
        assert torch.equal(parallel.get_parameter(name).full_tensor(), weight), f"{name} has been trained"
    piece = next(p for name, p in parallel.named_parameters() if "q_proj.lora_B" in name)

    with shared_folder() as folder:
        parallel.save_pretrained(folder)  # all ranks call it, and the first one writes
        parallel.eval()
        (ids,) = batches(1)
        with torch.no_grad():
            logits = parallel(input_ids=ids).logits.full_tensor()
        parallel.close()
        if is_first():
            alone = adapted()
            single = train_alone(
                lambda ids: alone(input_ids=ids, labels=ids).loss,
                torch.optim.AdamW(trainable(alone), lr=1e-2),
                batches(4),
            )
            compare("loss", ours, single, tolerance=1e-4)
            print(f"lora_B of q_proj: {list(piece.shape)}, on each rank {list(piece.to_local().shape)}")
            plain = PeftModel.from_pretrained(base(), folder).eval()
            with torch.no_grad():
                torch.testing.assert_close(plain(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)
            print(f"the {len(frozen)} frozen weights are as before, and with the adapters PEFT has the same outputs")


if __name__ == "__main__":
    on_ranks(main)
