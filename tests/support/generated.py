"""Tokens that small language models generate, alone and on meshes; also on ranks."""

from __future__ import annotations

from typing import Any

import torch
from checkpoints import told
from torch import nn
from transformers_models import VOCABULARY, gpt2, llama

import autopar
from autopar import Mesh

MODELS: dict[str, Any] = {
    "llama": lambda: llama(kv=2, layers=2, eos_token_id=None),
    "gpt2": lambda: gpt2(layers=2, bos_token_id=None, eos_token_id=None, pad_token_id=0),
}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def prompts(rows: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, with padding on the left."""
    generator = torch.Generator().manual_seed(rows)
    mask = (torch.arange(length) >= torch.arange(rows)[:, None] % (length - 1)).long()
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}


def alone(name: str, given: dict[str, torch.Tensor], **options: Any) -> Any:
    """What the model generates on a single device."""
    made = model(name)
    torch.manual_seed(3)
    return made.generate(**given, use_cache=True, **options)


def on_ranks(name: str, mesh: Mesh, plan: Any, every: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokens of several generations, the bytes of the cache after each, and the captures after each.

    The ranks have different seeds; the first rank's counts.
    """
    parallel = autopar.parallelize(model(name), mesh, plan)
    found: dict[str, Any] = {"tokens": [], "bytes": [], "captures": []}
    for options in every:
        torch.manual_seed(3 + torch.distributed.get_rank())
        found["tokens"].append(parallel.generate(**prompts(), **options))
        found["bytes"].append(parallel.generation.cache_bytes)
        found["captures"].append(parallel.captures)
    found["next"] = torch.rand(1).item()  # the generators of all ranks are in one state after sampling
    parallel.close()
    return found


def other_prompts() -> tuple[str, str]:
    """What is said where the ranks have different prompts, and that they can go on."""
    parallel = autopar.parallelize(model("llama"), Mesh(dp=2, tp=2), "megatron")
    rank = torch.distributed.get_rank()
    given = prompts()
    other = {**given, "input_ids": (given["input_ids"] + (rank == 3)).clamp(max=VOCABULARY - 1)}
    said = told(lambda: parallel.generate(**other, max_new_tokens=2, do_sample=False))
    parallel.generate(**given, max_new_tokens=2, do_sample=False)
    parallel.close()
    return said


def local_inputs() -> tuple[str, str]:
    parallel = autopar.parallelize(model("llama"), Mesh(dp=2, tp=2), "megatron", inputs="local")
    said = told(lambda: parallel.generate(**prompts(), max_new_tokens=2))
    parallel.close()
    return said
