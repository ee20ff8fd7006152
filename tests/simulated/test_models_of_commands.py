"""The model that a command is about: the user's functions and classes, architectures of Hugging Face, and arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_models import batch, exported, net
from typer.testing import CliRunner

from autopar.cli.app import app
from autopar.cli.models.given import Given, model_of
from autopar.cli.models.hugging_face import configurations
from autopar.cli.models.inputs import inputs_of, parts_of
from autopar.cli.models.options import ModelOptions
from autopar.cli.train.refused import Refused
from autopar.ir.structure import flatten

OWN = """\
import numpy, torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 6)

class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(int(torch.tensor(3).item()), 4))

    def forward(self, x):
        return x @ self.w

class Labelled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.e = torch.nn.Embedding(8, 4)

    def forward(self, input_ids, labels=None):
        return self.e(input_ids).sum() if labels is None else (self.e(input_ids).sum(-1) * labels).sum()

class Needs(torch.nn.Module):
    def __init__(self, width):
        super().__init__()

def alone():
    return Net()

def both():
    return Net(), (torch.ones(2, 4),)

def device():
    return Net().to("cpu"), (torch.ones(2, 4, device="cpu"),)

def mixed():
    return Net(), (torch.from_numpy(numpy.ones((2, 4), dtype="float32")),)

def batch():
    return {"input": torch.ones(3, 4)}

def tensor():
    return torch.ones(3, 4)
"""
SMALL = ("hidden_size=32,num_hidden_layers=1,intermediate_size=64", "num_attention_heads=4", "vocab_size=50")


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_models.py"
    path.write_text(OWN)
    return str(path)


def given(model: str, *, values: bool = False, **options: Any) -> Given:
    return model_of(ModelOptions(model=model, **options), values=values)


def tensors(found: Given) -> list[torch.Tensor]:
    leaves = [leaf for leaf in flatten(found.example)[0] if isinstance(leaf, torch.Tensor)]
    return [*found.model.parameters(), *found.model.buffers(), *leaves]


@pytest.mark.parametrize(
    ("function", "options", "shape"),
    [
        ("both", {}, (2, 4)),
        ("both", {"inputs": "input=f32[5,4]"}, (5, 4)),
        ("alone", {"inputs": "input=f32[5,4]"}, (5, 4)),
        ("Net", {"inputs": "input=f32[5,4]"}, (5, 4)),
        ("Net", {"example": "batch"}, (3, 4)),
        ("both", {"example": "batch"}, (3, 4)),
    ],
)
def test_functions_and_classes_are_made_on_meta(
    own: str, function: str, options: dict[str, str], shape: tuple[int, ...]
) -> None:
    if "example" in options:
        options = {"example": f"{own}:{options['example']}"}
    for values in (False, True):
        found = given(f"{own}:{function}", values=values, **options)
        assert type(found.model).__name__ == "Net" and found.notes == ()
        assert all(tensor.is_meta != values for tensor in tensors(found))
        assert next(leaf for leaf in flatten(found.example)[0]).shape == shape


@pytest.mark.parametrize(
    ("function", "why"),
    [("Reads", "RuntimeError: Tensor.item() cannot be called on meta tensors, at own_models.py:10  self.w ="),
     ("device", "NotImplementedError: Cannot copy out of meta tensor; no data!"),
     ("mixed", "it names a device")],
)  # fmt: skip
def test_what_cannot_be_on_meta_has_its_values_and_says_why(own: str, function: str, why: str) -> None:
    found = given(f"{own}:{function}", inputs="x=f32[2,3]" if function == "Reads" else None)
    assert not any(tensor.is_meta for tensor in tensors(found))
    (note,) = found.notes
    assert note.startswith(f"the model has its values, which take memory: on meta, {why}")


def test_labels_are_added_where_a_model_takes_them(own: str) -> None:
    found = given(f"{own}:Labelled", inputs="input_ids=i64[8,16]")
    assert found.example["labels"].shape == (8, 16) and found.notes == ("labels=i64[8, 16] are added, for the loss",)
    found = given(f"{own}:Labelled", inputs="input_ids=i64[8,16],labels=f32[8,16]")
    assert found.example["labels"].dtype == torch.float32 and found.notes == ()
    found = given(f"{own}:Labelled", inputs="x=f32[8,16]")
    assert found.notes == ("Labelled takes labels, and none are given: what is planned may have no loss",)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "made", "labels", "notes"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM", [2, 8], 0),
        ("llama", "LlamaForCausalLM", [2, 8], 1),
        ("hf:llama", "LlamaForCausalLM", [2, 8], 1),
        ("llama-3-8b", "LlamaForCausalLM", [2, 8], 1),
        ("bert", "BertForMaskedLM", [2, 8], 1),
        ("BertForSequenceClassification", "BertForSequenceClassification", [2], 0),
        ("LlamaModel", "LlamaModel", None, 0),
        ("FILE", "LlamaForCausalLM", [2, 8], 1),
        ("FOLDER", "LlamaForCausalLM", [2, 8], 1),
    ],
)
def test_architectures_of_hugging_face(
    name: str, made: str, labels: list[int] | None, notes: int, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 16, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = {"FILE": str(tmp_path / "config.json"), "FOLDER": str(tmp_path)}.get(name, name)
    found = given(name, set=SMALL, batch=2, sequence=8)
    assert type(found.model).__name__ == made and all(tensor.is_meta for tensor in tensors(found))
    assert found.model.config.hidden_size == 32 and found.model.config.vocab_size == 50
    of_file = str(tmp_path) in name
    assert next(found.model.parameters()).dtype == (torch.bfloat16 if of_file else torch.float32)
    assert torch.get_default_dtype() == torch.float32
    assert not of_file or found.model.config.head_dim == 16
    assert found.example["input_ids"].shape == (2, 8)
    assert (list(found.example["labels"].shape) if "labels" in found.example else None) == labels
    assert [note for note in found.notes if "is planned as" in note] == [f"{name} is planned as a {made}"] * notes


@pytest.mark.long
def test_pictures_and_ids_for_two_sides() -> None:
    small = ("hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,image_size=8,patch_size=4",)
    found = given("vit-base", set=small, batch=2, values=True)
    assert found.example["pixel_values"].shape == (2, 3, 8, 8) and found.example["labels"].shape == (2,)
    assert found.model(**found.example).loss.isfinite()
    found = given("t5", set=("d_model=16,d_ff=32,d_kv=8,num_layers=1,num_heads=2",), batch=2, sequence=4, values=True)
    assert type(found.model).__name__ == "T5ForConditionalGeneration"
    assert found.model(**found.example).loss.isfinite()
    found = given(
        "T5Model", set=("d_model=16,d_ff=32,d_kv=8,num_layers=1,num_heads=2",), batch=2, sequence=4, values=True
    )
    assert found.model(**found.example)[0].shape == (2, 4, 16)


@pytest.mark.long
def test_named_configurations_have_their_sizes() -> None:
    """The numbers of parameters are those that the models are called by."""
    billions = {
        "llama-2-7b": 6.738, "llama-2-13b": 13.016, "llama-2-70b": 68.977, "llama-3-8b": 8.030, "llama-3-70b": 70.554,
        "mistral-7b": 7.242, "gpt2": 0.124, "gpt2-xl": 1.558, "bert-base": 0.110, "bert-large": 0.335,
        "vit-base": 0.086,
    }  # fmt: skip
    assert billions.keys() == configurations().keys()
    for name, wanted in billions.items():
        model = given(name, batch=1, sequence=8).model
        assert abs(sum(parameter.numel() for parameter in model.parameters()) / 1e9 - wanted) < 1e-3, name


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("LlamaForCausalLM", {"set": ("hiden_size=4",)}, "--set hiden_size: the configuration of LlamaForCausalLM has "
                                                         "no hiden_size; near it: hidden_size, hidden_act"),
        ("LlamaForCausalLM", {"set": ("hidden_size",)}, "--set hidden_size: write it as in --set hidden_size=256,"),
        ("LlamaForCausalLM", {"set": ("hidden_size=30",)}, "The hidden size (30) is not a multiple of the number of "
                                                           "attention heads (32).; change it with --set"),
        ("LlamaForCausalLM", {"sequence": 4096}, "--sequence 4096 is longer than the 2048 positions of LlamaForCausalLM"
                                                 "; use a shorter one, or --set max_position_embeddings=4096"),
        ("hf:lama", {}, "has no architecture lama, and code of a folder is not run; did you mean llama"),
        ("none.json", {}, "none.json: No such file or directory; name a folder with a config.json, or the file itself"),
        ("WhisperForConditionalGeneration", {"set": ("d_model=18,encoder_layers=1,decoder_layers=1",)},
         "takes input_features, whose shape its configuration does not say; give it, as in --inputs "
         "input_features=f32[8,…]"),
    ],
)  # fmt: skip
def test_architectures_that_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as caught:
        given(name, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON: "),
        ("[]", "has no model_type"),
        ('{"model_type": "mine"}', "has no architecture mine, and code"),
    ],
)
def test_files_that_are_no_configuration(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    for name in (str(file), str(tmp_path)):
        with pytest.raises(Refused, match=said):
            given(name)


def test_inputs_are_read() -> None:
    found = inputs_of("a=i64[8,2048], b=bf16[], c=bool[3],d=c64[2,2]", "meta")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "a": (torch.int64, (8, 2048)), "b": (torch.bfloat16, ()), "c": (torch.bool, (3,)),
        "d": (torch.complex64, (2, 2)),
    }  # fmt: skip
    drawn = inputs_of("a=i64[64],b=f32[64]", "cpu")
    assert set(drawn["a"].tolist()) == {0, 1} and drawn["b"].std() > 0.5
    assert parts_of("a=[1,2],b=3,,c=x") == ["a=[1,2]", "b=3", "c=x"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "--inputs x: x is no tensor; write it as in --inputs input_ids=i64[8,2048],mask=bool[8,2048]"),
        ("x=f32", "x=f32 is no tensor"),
        ("x=f32[2],x=f32[2]", "--inputs x=f32[2],x=f32[2] has x twice"),
        ("x=int64[2]", "--inputs x=int64[2]: there is no dtype int64; there are f64, f32, "),
        ("x=b16[2]", "did you mean bf16?"),
        ("x=f32[-2]", "x=f32[-2] is no tensor"),
        (",", "--inputs ',' has no tensor"),
    ],
)
def test_inputs_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(Refused) as caught:
        inputs_of(text, "meta")
    assert said in str(caught.value)


def test_functions_that_are_refused(own: str) -> None:
    for name, options, said in (
        ("Needs", {}, "own_models.py:Needs is called without arguments, and it has one (missing a required argument: "
                      "'width')"),
        ("Net", {"example": f"{own}:tensor"}, "tensor returns a Tensor; it must return the arguments of one call: "),
        ("Net", {"example": f"{own}:none"}, "own_models.py has no function none; it has "),
        ("Net", {"example": own}, "names no function; write FILE.py:FUNCTION, as in model.py:make"),
    ):  # fmt: skip
        with pytest.raises(Refused) as caught:
            given(f"{own}:{name}", **options)
        assert said in str(caught.value)


def test_a_file_is_run_once(tmp_path: Path) -> None:
    path = tmp_path / "counted_runs.py"
    path.write_text(OWN + f"\nwith open({str(tmp_path / 'runs')!r}, 'a') as file:\n    file.write('x')\n")
    given(f"{path}:Net", example=f"{path}:batch")
    assert (tmp_path / "runs").read_text() == "x"


def test_a_file_of_torch_export(tmp_path: Path) -> None:
    file, (x, mask) = tmp_path / "net.pt2", batch()
    torch.export.save(exported(net()), file)
    given = model_of(ModelOptions(model=str(file)))
    assert [name for name, _ in given.model.named_parameters()] == [name for name, _ in net().named_parameters()]
    torch.testing.assert_close(given.example, ((x,), {"mask": mask}))
    own = model_of(ModelOptions(model=str(file), inputs="x=f64[8,8],mask=f64[8]"))
    assert own.example["x"].shape == (8, 8)


def test_a_file_that_has_no_exported_program(tmp_path: Path) -> None:
    (tmp_path / "broken.pt2").write_bytes(b"no archive")
    with pytest.raises(Refused, match=r"broken.pt2 is no program of torch.export; torch.export.save writes one"):
        model_of(ModelOptions(model=str(tmp_path / "broken.pt2")))
    with pytest.raises(Refused, match=r"there is no file none.pt2; torch.export.save\(.*, 'none.pt2'\) writes one"):
        model_of(ModelOptions(model="none.pt2"))


def test_numbers_of_an_exported_program_are_not_compared_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    torch.export.save(exported(net()), file)
    result = CliRunner().invoke(app, ["verify", str(file), "--mesh", "dp=2", "--plan", "ddp"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["verify", str(file), "--mesh", "dp=2", "--plan", "ddp", "--run"])
    assert result.exit_code == 2 and "an exported program keeps its dtypes and its mode" in result.output
