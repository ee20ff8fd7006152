"""Models of the zoo on meshes: simulated ranks equal eager, outputs, gradients and buffers, in float64 throughout."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures_alike import MESHES, SQUARE, check_equal, over_tp
from casts import promoted_casts  # noqa: F401
from torch import nn
from zoo import DEPTH
from zoo_architectures import ARCHITECTURES

import autopar
from autopar import CaptureError, Mesh, PlanError
from autopar.capture import capture

NAMED = ["llama tied", "gpt2", "bert", "t5", "vit", "resnet", "mixtral"]
MORE = [  # on dp=2 tp=2; all others of the zoo: python profiling/run.py architectures
    "nn.Transformer", "gru", "unet", "dcgan", "mlp mixer", "dlrm", "gcn", "vae",
    "gemma2", "bloom", "falcon", "mamba", "albert", "modernbert", "reformer", "wav2vec2", "convnext", "llava",
]  # fmt: skip
ALIKE = {  # one that runs → others that are built like it
    "llama tied": ["mistral", "qwen3", "olmo2"],
    "gpt2": ["gpt neox", "gpt bigcode"],
    "mixtral": ["qwen2 moe"],
    "t5": ["bart"],
    "unet": ["denoiser"],
    "llava": ["clip"],
}
BUILT_ALIKE = [
    pytest.param(name, marks=pytest.mark.sweep("ALIKE tells the architecture that is built like it"))
    for names in ALIKE.values()
    for name in names
]


@pytest.fixture
def float64(promoted_casts: None) -> Iterator[None]:  # noqa: F811
    """Also of what a model makes without a dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


ON_ALL_MESHES = "llama tied"
ALSO = [("resnet", "dp=4"), ("mixtral", "2x2x2")]  # beside the square
CASES = [
    pytest.param(
        name,
        mesh,
        id=f"{name} {label}",
        marks=()
        if name == ON_ALL_MESHES or mesh is SQUARE or (name, label) in ALSO
        else pytest.mark.sweep("it runs on the square, and on this mesh others run"),
    )
    for name in NAMED
    for label, mesh in MESHES.items()
    if "cp" not in mesh.names or ARCHITECTURES[name].sequence
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_named(name: str, mesh: Mesh) -> None:
    check_equal(name, mesh)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", [*MORE, *BUILT_ALIKE])
def test_more(name: str) -> None:
    check_equal(name, SQUARE)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", [
    "bert", "nn.Transformer",
    *(
        pytest.param(name, marks=pytest.mark.sweep("bert and nn.Transformer drop in attention, and in their layers"))
        for name in ("llama tied", "mixtral")
    ),
])  # fmt: skip
def test_dropout(name: str) -> None:
    check_equal(name, SQUARE, dropout=0.1)


# beside test_transformers.py
LIKE_AN_EXPERT = [
    "nn.Transformer", "t5", "resnet", "mixtral", "codegen", "modernbert",
    *(
        pytest.param(name, marks=pytest.mark.sweep("its layer has what those of nn.Transformer or of codegen have"))
        for name in ("vit", "gpt neo", "qwen3")
    ),
]  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", LIKE_AN_EXPERT)
def test_the_transfers_of_a_layer(name: str) -> None:
    """Those of two layers less those of one are what an expert of Megatron has."""
    one, two = over_tp(name, 1), over_tp(name, 2)
    more = {
        t: tuple(b - a for a, b in zip(one.get(t, [0, 0]), two[t], strict=True)) for t in two if two[t] != one.get(t)
    }
    block = ARCHITECTURES[name].block
    assert more == ({"all_reduce": block} if block else {})


REFUSED = {  # not one static graph → what the error says
    "recurrent gemma": ("forward keeps a tensor in model.layers.0.temporal_block.rg_lru.recurrent_st", "return it, "),
    "ibert": ("if self.x_min.min() > -1.1e-5 and self.x_max.max() < 1.1e-5:", "inside the graph with torch.where"),
    "wav2vec2 ctc": ("flattened_targets = labels.masked_select(labels_mask)", "count nothing, with torch.where"),
    "vilt": ("nn.functional.interpolate(", "compute the sizes outside of forward"),
    "idefics3": ("forward makes a tensor of as many rows as a mask selects", "with torch.ones_like"),
    "autoformer": ("value_states.roll(shifts=-int(top_k_delays_index[i])", "roll with torch.gather"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    if name == "idefics3" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 refuses a size that is a value in its own words")
    architecture = ARCHITECTURES[name]
    with pytest.raises(CaptureError) as caught:
        capture(architecture.make(), (), architecture.batch())
    assert all(piece in str(caught.value) for piece in REFUSED[name]), str(caught.value)


READ_VALUES = [  # experts in loops, checks, masks that are filled, values of the inputs
    "dbrx", "switch", "jetmoe", "nllb moe", "xlm", "prophetnet", "longformer", "encodec", "splinter", "kosmos2 text",
    *(
        pytest.param(name, marks=pytest.mark.sweep("it reads values as another one does"))
        for name in ("flaubert", "led", "fsmt")
    ),
]  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", READ_VALUES)
def test_values_are_read(name: str) -> None:
    check_equal(name, SQUARE)


@pytest.mark.usefixtures("float64")
def test_experts_that_loop_equal_the_batched_product() -> None:
    architecture = ARCHITECTURES["mixtral"]
    model, given = architecture.make(), architecture.batch()
    expected = model(**given).loss
    model.set_experts_implementation("eager")
    parallel = autopar.parallelize(model, Mesh(dp=2, ep=2), "ddp", example=((), given))
    torch.testing.assert_close(parallel.simulate(**given).loss, expected, rtol=1e-10, atol=1e-10)
    assert any("4 experts are computed for all tokens" in note for note in parallel.reports["capture"].notes)


# -- what a forward does beside the tensors ---------------------------------------------------------------------------


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.arange(float(size))


def remembered(function: Any) -> Any:
    kept = functools.lru_cache(function)
    return lambda *args: kept(*args)


@remembered
def wrapped_table(size: int) -> torch.Tensor:
    return torch.arange(float(size))


class Remembering(nn.Module):
    @staticmethod
    @functools.lru_cache
    def own_table(size: int) -> torch.Tensor:
        return torch.arange(float(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * table(x.shape[-1]) + wrapped_table(x.shape[-1]) + self.own_table(x.shape[-1])


def test_caches_of_functions_keep_nothing_of_a_trace() -> None:
    x, model = torch.randn(4, 3), Remembering()
    for _ in range(2):
        parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
        torch.testing.assert_close(parallel.simulate(x), x * torch.arange(3.0) + 2 * torch.arange(3.0))
    torch.testing.assert_close(model(x), x * torch.arange(3.0) + 2 * torch.arange(3.0))


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


def test_numbers_that_python_draws_are_told() -> None:
    with pytest.raises(CaptureError, match="forward draws numbers from random, and a captured step keeps the value"):
        capture(Drawing(), (torch.randn(4),))
    (note,) = capture(Drawing(), (torch.randn(4),), keep=True).notes
    assert note.startswith("forward draws numbers from random; the captured step keeps the value of the first call\n")


class Checking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = torch.distributions.Normal(x, self.scale, validate_args=True)
        return -normal.log_prob(x + 1).mean()


def test_distributions_do_not_check_values_in_a_capture() -> None:
    x, model = torch.randn(4, 3), Checking()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
    torch.testing.assert_close(parallel.simulate(x), model(x))
    (note,) = [note for note in parallel.reports["capture"].notes if "leaves the check out" in note]
    assert note.endswith("normal = torch.distributions.Normal(x, self.scale, validate_args=True)")
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(x, -torch.ones(3), validate_args=True)


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reversible.apply(self.layer(x), self.layer)


def test_a_backward_inside_of_a_backward_fills_gradients_too() -> None:
    """As in reversible layers: eager adds what the inner one puts into ``.grad`` to what the outer one makes."""
    x, model = torch.randn(4, 3), Reversed()
    eager = copy.deepcopy(model)
    eager(x).square().sum().backward()
    autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,)).simulate(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# -- names with classes in plans --------------------------------------------------------------------------------------


class Wide(nn.Linear):
    pass


def test_a_plan_may_name_the_class_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Wide(4, 4), nn.Sequential(Wide(4, 4)))
    example = (torch.randn(4, 4),)
    text = str(autopar.parallelize(model, Mesh(tp=2), {"*:Wide.weight": ("tp", None)}, example=example).program)
    assert "_0_weight : f32[4 4]" in text and "_1_weight : f32[4/tp 4]" in text and "_2_0_weight : f32[4/tp 4]" in text
    text = str(autopar.parallelize(model, Mesh(tp=2), {"2.*:Wide.weight": ("tp", None)}, example=example).program)
    assert "_1_weight : f32[4 4]" in text and "_2_0_weight : f32[4/tp 4]" in text
    with pytest.raises(PlanError, match=r"matches no parameter or input; near it: 1:Wide\.weight"):
        autopar.parallelize(model, Mesh(tp=2), {"*:Wider.weight": ("tp", None)}, example=example)


def test_the_zoo_is_wide() -> None:
    assert len(ARCHITECTURES) > 200
    assert (
        ARCHITECTURES["bert"].config["num_hidden_layers"] is DEPTH
        and len(ARCHITECTURES["bert"].make(3).bert.encoder.layer) == 3
    )
    on, off = ARCHITECTURES["bert"].make(dropout=0.1), ARCHITECTURES["bert"].make()
    assert on.config.attention_probs_dropout_prob == 0.1 and off.config.attention_probs_dropout_prob == 0.0
    assert {m.p for m in on.modules() if isinstance(m, nn.Dropout)} == {0.1} and {
        m.p for m in off.modules() if isinstance(m, nn.Dropout)
    } == {0.0}
