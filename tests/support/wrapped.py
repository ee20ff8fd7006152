"""Models whose layers are wrapped: adapters of PEFT, parametrizations, and wrappers of torch."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import Block
from torch import nn
from torch.nn.utils import parametrizations
from transformers_models import gpt2, llama

import autopar

HAS_PEFT = importlib.util.find_spec("peft") is not None

LLAMA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model: nn.Module, layers: list[str], **options: Any) -> nn.Module:
    """A model with LoRA in some layers; what is added is not zero."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reads what transformers deprecates
        return get_peft_model(
            model, LoraConfig(r=2, init_lora_weights=False, target_modules=layers, **options)
        ).double()


def lora_llama(layers: list[str] = LLAMA_LAYERS, depth: int = 1, **options: Any) -> nn.Module:
    return adapted(llama(kv=2, layers=depth), layers, **options)


def lora_gpt2(**options: Any) -> nn.Module:
    return adapted(gpt2(), ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, **options)


class Fed(nn.Module):
    """Two pairs of a column and a row, with the names of a preset, of a Llama's feed-forward and of an OPT's."""

    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda layer: layer) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(12, 8)
        self.fc1, self.fc2 = nn.Linear(8, 6), nn.Linear(6, 8)
        for layer in self.children():
            wrap(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down_proj(torch.relu(self.up_proj(x)))
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Added(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rows, 2)), nn.Parameter(torch.randn(2, columns))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + self.a @ self.b


def _with_added(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", Added(*layer.weight.shape))


def _with_two(layer: nn.Module) -> None:
    parametrizations.spectral_norm(layer)
    _with_added(layer)


def _of_the_bias(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())


def _orthogonal_in_each_pair(layer: nn.Module) -> None:
    """The column of one, the row of the other: it takes many ops."""
    if (layer.in_features, layer.out_features) in ((8, 12), (6, 8)):
        parametrizations.orthogonal(layer)


PARAMETRIZED: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm of columns": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "weight norm of all": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": _orthogonal_in_each_pair,
    "low rank": _with_added,
    "two": _with_two,
    "bias": _of_the_bias,
}


class Wraps(nn.Module):
    """A wrapper of torch as it names what it wraps, without what else it does."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.wraps = name
        self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.wraps)(*args, **kwargs)


def nested(name: str) -> nn.Module:
    """Blocks in a list, each of them and one of their layers wrapped."""
    model = nn.Sequential(Block(), Wraps(name, Block()))
    model[0].up = Wraps(name, model[0].up)
    return model


def saved_adapters(folder: str, plan: str, options: dict[str, Any]) -> None:
    """On ranks: PEFT's files of a model on the mesh have the tensors that they have on one device."""
    from safetensors.torch import load_file
    from torch import distributed

    torch.manual_seed(0)
    model = lora_llama(["q_proj"], **options)
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that embeddings are saved, too
        parallel.save_pretrained(folder)
        model.save_pretrained(alone := f"{folder}/alone{distributed.get_rank()}")
    ours, one = (load_file(f"{at}/adapter_model.safetensors") for at in (folder, alone))
    assert ours.keys() == one.keys() and all(torch.equal(ours[name], one[name]) for name in one)
