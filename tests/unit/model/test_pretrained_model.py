"""A model on a mesh as transformers and PEFT see it: its class, its signature, and the folder that it writes."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers_models import llama

import autopar
from autopar import Mesh
from autopar.model.state_dicts import gathered
from autopar.parallel import Parallel

MESH = Mesh(dp=2, tp=2)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return llama(kv=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def parallel(model: nn.Module) -> Parallel:
    return autopar.parallelize(model, MESH, "megatron")


class Keywords(nn.Module):
    def forward(self, x: torch.Tensor, /, scale: float = 2.0, *, self_: Any = None, **more: Any) -> torch.Tensor:
        return x * scale


@pytest.mark.parametrize("made", [Keywords(), nn.Linear(2, 2)])
def test_forward_has_the_signature_of_the_models_forward(made: nn.Module) -> None:
    parallel = autopar.parallelize(made, MESH)
    assert inspect.signature(parallel.forward) == inspect.signature(made.forward)
    assert parallel.forward.__self__ is parallel
    assert inspect.signature(Parallel.forward) == inspect.signature(lambda self, *args, **kwargs: None).replace(
        parameters=list(inspect.signature(Parallel.forward).parameters.values()),
        return_annotation=inspect.signature(Parallel.forward).return_annotation,
    )


def test_two_models_have_their_own_signatures(model: nn.Module, parallel: Parallel) -> None:
    other = autopar.parallelize(Keywords(), MESH)
    assert list(inspect.signature(other.forward).parameters) == ["x", "scale", "self_", "more"]
    assert inspect.signature(parallel.forward) == inspect.signature(model.forward)


def test_it_is_an_instance_of_the_models_class(model: nn.Module, parallel: Parallel) -> None:
    from transformers import LlamaForCausalLM, PreTrainedModel

    assert isinstance(parallel, PreTrainedModel) and isinstance(parallel, LlamaForCausalLM)
    assert isinstance(parallel, Parallel) and type(parallel) is Parallel
    assert parallel.__class__ is LlamaForCausalLM and parallel.config is model.config


def test_a_model_without_a_folder_format_is_a_parallel_alone() -> None:
    parallel = autopar.parallelize(nn.Linear(2, 2), MESH)
    assert parallel.__class__ is Parallel and not isinstance(parallel, nn.Linear)
    assert not hasattr(parallel, "is_distributed_loading_by_transformers") and not hasattr(parallel, "tp_size")


def test_an_attribute_of_the_users_model_is_the_models() -> None:
    model = nn.Linear(2, 2)
    model.tp_size = 3
    parallel = autopar.parallelize(model, MESH)
    assert parallel.tp_size == 3
    parallel.tp_size = 4
    assert model.tp_size == 4


def test_methods_that_read_are_the_models_and_others_are_not_there(model: nn.Module, parallel: Parallel) -> None:
    assert parallel.num_parameters() == model.num_parameters()
    assert parallel.get_input_embeddings() is model.get_input_embeddings()
    with pytest.raises(AttributeError, match="'Parallel' object has no attribute 'resize_token_embeddings'"):
        parallel.resize_token_embeddings  # noqa: B018  # it would run on the original model


def test_a_process_that_is_alone_is_not_one_of_several(parallel: Parallel) -> None:
    assert parallel.tp_size is None and parallel.is_distributed_loading_by_transformers is False


def test_the_folder_is_that_of_the_model(model: nn.Module, parallel: Parallel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    parallel.save_pretrained(tmp_path / "parallel")
    assert sorted(os.listdir(tmp_path / "model")) == sorted(os.listdir(tmp_path / "parallel"))
    assert (tmp_path / "model/config.json").read_text() == (tmp_path / "parallel/config.json").read_text()
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "parallel"))
    assert theirs.keys() == ours.keys() and "lm_head.weight" not in ours  # tied: once
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_tied_weights_are_gathered_once(model: nn.Module) -> None:
    state = model.state_dict(keep_vars=True)
    whole = gathered(state, True)
    assert whole.keys() == state.keys() and whole["lm_head.weight"] is whole["model.embed_tokens.weight"]
    assert gathered(state, False) == {}


def test_options_are_those_of_the_models_method(parallel: Parallel, tmp_path: Path) -> None:
    state = {name: tensor + 1 for name, tensor in parallel.state_dict().items()}
    parallel.save_pretrained(tmp_path, state_dict=state, max_shard_size="1KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    found = {key: value for path in tmp_path.glob("*.safetensors") for key, value in load_file(path).items()}
    assert torch.equal(found["model.norm.weight"], parallel.state_dict()["model.norm.weight"] + 1)


def test_a_model_that_has_no_folder_format(tmp_path: Path) -> None:
    text = (
        "a Linear has no save_pretrained, which models of transformers and PEFT have; save the weights "
        "with autopar.checkpoint.save(folder, parallel.state_dict())"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        autopar.parallelize(nn.Linear(2, 2), MESH).save_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_come_before(parallel: Parallel) -> None:
    peft = pytest.importorskip("peft")
    text = (
        "adapters are added to a model before it is on a mesh, because its layers are in pieces then: "
        "autopar.parallelize(get_peft_model(model, config), mesh)\n    test_pretrained_model.py:"
    )
    names = [name for name, _ in parallel.named_parameters()]
    with pytest.raises(TypeError, match=f"^{re.escape(text)}[0-9]+  peft.get_peft_model"):
        peft.get_peft_model(parallel, peft.LoraConfig(target_modules=["q_proj"]))
    assert [name for name, _ in parallel.named_parameters()] == names


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames the flag
def test_gradient_checkpointing_is_enabled_on_a_mesh() -> None:
    """As a Trainer does; blocks are captured anew, and the numbers are the same."""
    parallel, ids = autopar.parallelize(llama(kv=2).train(), Mesh(dp=2)), torch.randint(1, 10, (4, 6))
    losses = []
    for enabled in (False, True):
        if enabled:
            parallel.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert parallel.module.is_gradient_checkpointing == parallel.is_gradient_checkpointing == enabled
        losses.append(parallel.simulate(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(*losses)
    assert parallel.captures == 2
