"""Plans and presets see through wrappers, adapters and parametrizations; the numbers are those of a single device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from casts import promoted_casts  # noqa: F401
from equality import check_equal
from models import Block
from shared_captures import shared_captures  # noqa: F401
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers_models import batch, gpt2, llama
from wrapped import HAS_PEFT, LLAMA_LAYERS, PARAMETRIZED, Fed, Wraps, lora_gpt2, lora_llama, nested

import autopar
from autopar import Mesh, PlanError
from autopar.capture.naming import names_of
from autopar.ir.layout import DistAttr
from autopar.plan.constraints import layouts_of

MESH = Mesh(dp=2, tp=2)
X = torch.randn(4, 8, dtype=torch.float64)
float64 = pytest.mark.usefixtures("promoted_casts")
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")

COLUMN, ROW, WHOLE = DistAttr.split("tp", None), DistAttr.split(None, "tp"), DistAttr.replicated(2)
THREE = ((3, ()), (16, ("tp",)))


def split(model: nn.Module, plan: Any, *names: str) -> list[DistAttr]:
    """How parameters lie, by the ends of their names."""
    attrs = layouts_of(plan, model, MESH)
    found = []
    for end in names:
        (name,) = (name for name, _ in model.named_parameters() if name.endswith(end))
        found.append(attrs.get(name, DistAttr.replicated(model.get_parameter(name).dim())))
    return found


# -- adapters ------------------------------------------------------------------------------------------------------


@needs_peft
def test_the_parts_of_an_adapter_follow_their_base() -> None:
    model = lora_llama(use_dora=True)
    for layer, base, a, b, magnitude in (
        ("0.self_attn.q_proj", COLUMN, WHOLE, COLUMN, DistAttr.split("tp")),
        ("0.mlp.down_proj", ROW, ROW, WHOLE, DistAttr.split(None)),
    ):
        parts = (
            "base_layer.weight",
            "lora_A.default.weight",
            "lora_B.default.weight",
            "lora_magnitude_vector.default.weight",
        )
        assert split(model, "megatron", *(f"{layer}.{part}" for part in parts)) == [base, a, b, magnitude]


@needs_peft
def test_of_conv1d_and_embeddings_the_weight_is_in_out() -> None:
    """GPT-2's c_attn has query, key and value side by side, and each is split by itself."""
    model = lora_gpt2()
    parts = ("base_layer.weight", "base_layer.bias", "lora_A.default.weight", "lora_B.default.weight")
    whole = ((None, ()),)
    assert split(model, "megatron", *(f"c_attn.{part}" for part in parts)) == [
        DistAttr((whole, THREE)),
        DistAttr((THREE,)),
        WHOLE,
        DistAttr((THREE, whole)),
    ]
    assert split(model, "megatron", *(f"mlp.c_proj.{part}" for part in parts)) == [
        COLUMN,
        DistAttr.split(None),
        ROW,
        WHOLE,
    ]
    model = lora_llama(["embed_tokens"])
    assert split(model, "megatron", "base_layer.weight", "lora_embedding_A.default", "lora_embedding_B.default") == [
        COLUMN,
        ROW,
        WHOLE,
    ]


@needs_peft
def test_globs_see_through_adapters() -> None:
    """The exact name has precedence within a mapping, a class is the base layer's, and parts follow unless they are
    named."""
    model = lora_llama(["q_proj"])
    base, a, b = "q_proj.base_layer.weight", "q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight"
    for glob in ("*.q_proj.weight", "*.q_proj:Linear.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert split(model, {glob: (None, "tp")}, base, a, b) == [ROW, ROW, WHOLE]
    exact = {"*.q_proj.base_layer.weight": ("tp", None)}
    assert split(model, {"*.q_proj.weight": (None, "tp")} | exact, base, a, b) == [COLUMN, WHOLE, COLUMN]
    assert split(model, exact | {"*.q_proj.weight": (None, "tp")}, base, a, b) == [COLUMN, WHOLE, COLUMN]
    assert split(model, ["megatron", {"*.q_proj.weight": (None, "tp")}], base, a, b) == [ROW, ROW, WHOLE]
    assert split(model, {"*.q_proj.weight": (None, "tp"), "*.lora_A.*": ("tp",)}, base, a, b) == [ROW, COLUMN, WHOLE]
    assert split(
        lora_gpt2(), {"*.c_fc:Conv1D.weight": (None, "tp")}, "c_fc.base_layer.weight", "c_fc.lora_B.default.weight"
    ) == [ROW, COLUMN]
    with pytest.raises(
        PlanError,
        match=r"the plan contradicts itself on "
        r"base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.base_layer\.weight",
    ):
        layouts_of({"*.base_layer.weight": ("tp",), "*.q_proj.base_layer.weight": (None, "tp")}, model, MESH)


ADAPTED = {
    "llama": lambda: lora_llama(),
    "llama with dora": lambda: lora_llama(["q_proj", "o_proj", "up_proj", "down_proj"], use_dora=True),
    "llama with tables": lambda: lora_llama(["q_proj", "embed_tokens", "lm_head"]),
    "gpt2": lambda: lora_gpt2(),
}
ADAPTED = {name: functools.cache(make) for name, make in ADAPTED.items()}


@functools.cache
def plain_llama(layers: int) -> nn.Module:
    return llama(kv=2, layers=layers)


@pytest.mark.long
@needs_peft
@float64
@pytest.mark.filterwarnings("ignore")  # PEFT's, of tied tables
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("llama", "megatron+sp"), ("llama with dora", "megatron"), ("llama with tables", "megatron"),
        ("gpt2", "megatron"),
        *(
            pytest.param(name, preset, marks=pytest.mark.sweep("the adapter is there with the other preset"))
            for name, preset in [("llama", "megatron"), ("llama with dora", "megatron+sp"),
                                 ("llama with tables", "megatron+sp"), ("gpt2", "megatron+sp")]
        ),
    ],
)  # fmt: skip
def test_adapted_models(name: str, preset: str) -> None:
    model = ADAPTED[name]()
    model.zero_grad()
    check_equal(model, MESH, preset, (), batch())


@pytest.mark.long
@needs_peft
@float64
@pytest.mark.usefixtures("shared_captures")
def test_the_report_of_an_adapted_model() -> None:
    """It says of a preset the same as without adapters, and which parts follow."""
    notes = [
        autopar.parallelize(model, MESH, "megatron", example=batch()).reports["capture"].notes
        for model in (plain_llama(1), ADAPTED["llama"]())
    ]
    plain, adapted = notes
    assert plain[0].startswith("attention runs as causal")
    assert plain[1].startswith(
        "the preset megatron splits 9 parameters over tp: q_proj 1, k_proj 1, v_proj 1, gate_proj 1, up_proj 1, "
        "o_proj 1, down_proj 1, embed_tokens 1, lm_head 1; "
    )
    assert adapted == (
        *plain,
        "parts of adapters and parametrizations are split as the weights that they belong to: lora_B 5, lora_A 2",
    )


@pytest.mark.long
@needs_peft
@float64
@pytest.mark.usefixtures("shared_captures")
def test_the_transfers_of_an_adapted_block() -> None:
    """Over tp a block has the four all-reduces of the hidden size that it has without LoRA. Each adapted layer has one
    more of the width of its rank: what lora_A makes of a split input is a sum, and so is, in the backward, the gradient
    of what a split lora_B takes."""
    counts = []
    for model in (plain_llama(2), plain_llama(1), lora_llama(depth=2), ADAPTED["llama"]()):
        rows = [
            row
            for row in autopar.parallelize(model, MESH, "megatron", example=batch()).transfers
            if row.axis == "tp" and row.transfer not in ("slice", "pend")
        ]
        assert {row.transfer for row in rows} == {"all_reduce"}
        counts.append([sum(row.times for row in rows if row.phase == phase) for phase in ("forward", "backward")])
    two, one, two_adapted, one_adapted = counts
    assert [a - b for a, b in zip(two, one, strict=True)] == [2, 2]
    rows, columns = 2, 5
    assert len(LLAMA_LAYERS) == rows + columns
    assert [a - b for a, b in zip(two_adapted, one_adapted, strict=True)] == [2 + rows, 2 + columns]


# -- parametrizations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers(name: str) -> None:
    """Between the layers the transfers of activations are those without parametrizations: one after each pair, and one
    before."""
    parallel = check_equal(Fed(PARAMETRIZED[name]).double(), MESH, None, (X.clone().requires_grad_(),))
    (note, *_) = parallel.reports["capture"].notes
    assert note.startswith(
        "without a plan, the preset megatron splits 6 parameters over tp: up_proj 2, fc1 2, down_proj 1, fc2 1; "
    ), note
    hidden = [
        row
        for row in parallel.transfers
        if row.axis == "tp" and row.transfer == "all_reduce" and row.bytes == row.times * 2 * 8 * 8
    ]
    assert sum(row.times for row in hidden if row.phase == "forward") == 2, str(parallel.transfers)


def test_what_is_computed_is_split_as_its_name_asks() -> None:
    model = Fed(parametrizations.weight_norm)
    g, v = "parametrizations.weight.original0", "parametrizations.weight.original1"
    assert split(model, None, f"up_proj.{g}", f"up_proj.{v}", "up_proj.bias", f"down_proj.{g}", f"down_proj.{v}",
                 "down_proj.bias") == [
        COLUMN, COLUMN, DistAttr.split("tp"), WHOLE, ROW, DistAttr.split(None)
    ]  # fmt: skip
    assert split(model, {"*.up_proj.weight": ("tp", None)}, "up_proj.bias", "fc1.bias") == [DistAttr.split(None)] * 2
    assert split(model, {"*.up_proj:Linear.weight": ("tp",), f"*.{g}": ()}, f"up_proj.{g}", f"up_proj.{v}") == [
        WHOLE,
        COLUMN,
    ]
    (original,) = split(Fed(parametrizations.orthogonal), None, "up_proj.parametrizations.weight.original")
    assert original == WHOLE  # each of its elements is in each of the computed ones
    (original,) = split(Fed(PARAMETRIZED["bias"]), None, "up_proj.parametrizations.bias.original")
    assert original == DistAttr.split("tp")


@pytest.mark.long
def test_originals_that_stay_whole_are_told() -> None:
    """An orthogonal matrix needs all of its original, whatever a plan asks of the matrix."""
    plan = {"*.up_proj.weight": ("tp", None)}
    model = Fed(lambda layer: parametrizations.orthogonal(layer) if layer.out_features == 12 else None)
    parallel = autopar.parallelize(model, MESH, plan, example=(X.float(),))
    (note,) = (note for report in parallel.reports for note in report.notes if "parametrizations" in note)
    assert note == (
        "whole on every rank: up_proj.parametrizations.weight.original; each element that the parametrization "
        "computes depends on all of it, and the result is split"
    )


def test_a_computed_weight_whose_parts_follow_it_in_no_known_way() -> None:
    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

        def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return weight.clone(), torch.eye(weight.shape[1])

    model = nn.Sequential(nn.Linear(8, 6))
    parametrize.register_parametrization(model[0], "weight", Product(), unsafe=True)
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(model, Mesh(tp=2), {"*.0.weight": ("tp", None)}, example=(torch.randn(4, 8),))
    assert str(caught.value) == (
        "the plan's glob '*.0.weight' names a tensor that a parametrization computes from parts of other shapes, so "
        "the layouts of the parts are not known; name the parts: 0.parametrizations.weight.original0, "
        "0.parametrizations.weight.original1"
    )
    named = {"0.parametrizations.weight.original0": ("tp", None)}
    assert layouts_of(named, model, MESH)["0.parametrizations.weight.original0"] == COLUMN


@pytest.mark.long
def test_parametrizations_under_megatron_with_its_sequence_split() -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    for name in ("weight norm", "spectral norm"):
        check_equal(Fed(PARAMETRIZED[name]).double(), MESH, "megatron+sp", (x,))


# -- wrappers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_names_are_seen_through_wrappers(name: str) -> None:
    model = nested(name).double()
    plan = {"*.up.weight": ("tp", None), "1.down.weight": (None, "tp"), "1.up()": ("?", "tp"), "0.up()": ("?", "tp")}
    assert split(model, plan, f"0.up.{name}.weight", f"1.{name}.up.weight", f"1.{name}.down.weight") == [
        COLUMN,
        COLUMN,
        ROW,
    ]
    check_equal(model, MESH, plan, (X,))
    assert split(model, {"1.up:Linear.weight": ("tp",)}, f"1.{name}.up.weight", f"0.up.{name}.weight") == [
        COLUMN,
        WHOLE,
    ]


def test_an_ordinary_child_with_a_wrappers_name_is_none() -> None:
    """Only what torch's own classes wrap is called ``module``."""
    model = nn.ModuleDict({"a": Wraps("module", nn.Linear(4, 4))})
    assert names_of(model).through == []
    model = nn.ModuleDict({"a": torch.optim.swa_utils.AveragedModel(nn.Linear(4, 4))})
    assert ("a.weight", "a.module.weight") in names_of(model).through


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where its compiler is imported
def test_parts_that_are_compiled() -> None:
    """A capture takes what they are written as."""
    compiled = Block()
    compiled.compile()
    model = nn.Sequential(torch.compile(Block()), compiled).double()
    plan = {"0.up.weight": ("tp", None), "0.down.weight": (None, "tp")}
    parallel = autopar.parallelize(model, MESH, plan, example=(X,))
    assert "_orig_mod_up_weight : f64[12/tp 8] = param('0._orig_mod.up.weight')" in str(parallel.program)


def test_a_checkpoint_wrapper() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(Block(), checkpoint_wrapper(Block())).double()
    check_equal(model, MESH, {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}, (X,))


def test_models_without_wrappers_have_the_names_that_they_have() -> None:
    for model in (Block(), gpt2(), llama()):
        names = names_of(model)
        assert not names.through and not names.parts and not names.paths
