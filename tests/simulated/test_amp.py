"""Mixed precision: each op runs in the dtype that it has under ``torch.autocast``, forward and backward, with the same
numbers."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autocast_cases import CASES, Attention, Function, f, i
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed import eager, run, traced
from torch import nn

from autopar import Mesh
from autopar.capture import capture
from autopar.errors import PrecisionError, RuleError
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, TensorType
from autopar.ir.transfers import BY_FUNCTION
from autopar.passes.amp import low_precision
from autopar.passes.widen import Widen
from autopar.rules.registry import RULES

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOISE = {"bf16": 2e-2, "fp16": 3e-3}  # of gradients, relative, in norm: some units in the last place
COPY = torch.ops.aten._to_copy.default

# ops that run in float32 where autocast on CPU leaves them to low precision; precision.autocast.EXCEPTIONS says why
INSIDE = ("_softmax", "native_layer_norm")
APART = ("aten::mean.dim", "aten::native_batch_norm")

MEGATRON = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp"),
            "*.qkv.weight": ("(3 -1/tp)", None), "*.qkv.bias": ("(3 -1/tp)",), "*.out.weight": (None, "tp"),
            "*.head.weight": ("tp", None), "*.embed.weight": ("tp", None)}  # fmt: skip


def rows(program: Program) -> list[tuple[str, ...]]:
    """Phase, op, the dtypes in which it takes its operands and makes its results. Casts and views left out, and what
    makes a tensor of none."""
    found = []
    for node in program.nodes:
        if (
            node.op != "call_function"
            or is_getitem(node)
            or node.target is COPY
            or RULES[node.target].view
            or not operands(node)
        ):
            continue
        record = record_of(node)
        values = operands(node)
        needs = record.uses or (None,) * len(values)
        takes = [
            names(record_of(value).type) if need is None else DTYPE_NAMES[need.dtype]
            for value, need in zip(values, needs, strict=True)
        ]
        op = node.target.name().removeprefix("aten::")
        if op.startswith(INSIDE) or (record.call is not None and record.call.op in APART):
            found.append((record.phase, op))
        else:
            takes = [
                "made" if not operands(value) and value.op == "call_function" else name
                for value, name in zip(values, takes, strict=True)
            ]
            found.append((record.phase, op, *takes, "->", names(record.type)))
    return found


def names(type: Any) -> str:
    return " ".join(
        "None" if one is None else DTYPE_NAMES[one.dtype] for one in (type if isinstance(type, tuple) else (type,))
    )


def under_autocast(model: nn.Module, args: Any, dtype: torch.dtype) -> Program:
    with torch.autocast("cpu", dtype):
        return capture(model, args).program


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / (b.double().norm() + 1e-3))


# in both low precisions; with what they are made of, the others too
BOTH = ("transformer", "batch norm", "layer norm", "softmax", "residuals", "gated", "cross-entropy")
OTHER = pytest.mark.sweep("the lists of autocast on CPU are the same for both, and the case is there in the other")


@pytest.mark.parametrize(
    ("name", "low"),
    [
        *((name, "bf16") for name in CASES),
        *(pytest.param(name, "fp16", marks=() if name in BOTH else OTHER) for name in CASES),
    ],
)
def test_dtypes_are_those_of_autocast(name: str, low: str) -> None:
    model, args = CASES[name]()
    assert rows(traced(model, args, f"{low}-O1")) == rows(under_autocast(model, args, LOW[low]))


@pytest.mark.parametrize(
    ("name", "low"),
    [
        (name, low) if low == "fp16" or name in BOTH else pytest.param(name, low, marks=OTHER)
        for name in CASES
        if name != "powers"  # whose gradients overflow in fp16, in eager too
        for low in LOW
    ],
)
def test_numbers_are_those_of_autocast(name: str, low: str) -> None:
    """On four simulated ranks."""
    model, args = CASES[name]()
    wanted, gradients = eager(model, args, LOW[low])
    found = run(model, Mesh(dp=2, tp=2), MEGATRON if name == "transformer" else None, args, f"{low}-O1")
    assert [tensor.dtype for tensor in found.returned] == [tensor.dtype for tensor in wanted]
    assert all(distance(a, b) <= NOISE[low] for a, b in zip(found.returned, wanted, strict=True))
    for parameter, gradient in gradients.items():
        if not (name == "batch norm" and parameter == "first.bias"):  # zero, but for noise: the norm takes it away
            assert found.gradients[parameter].dtype == torch.float32
            assert distance(found.gradients[parameter], gradient) <= NOISE[low], parameter


STEPS: dict[str, Any] = {
    "product": lambda x, y, w: x @ w,
    "tanh": lambda x, y, w: x.tanh(),
    "exp": lambda x, y, w: (x / 4).exp(),
    "gelu": lambda x, y, w: F.gelu(x),
    "power": lambda x, y, w: x.pow(2),
    "add": lambda x, y, w: x + y,
    "subtract": lambda x, y, w: x - y,
    "multiply": lambda x, y, w: x * y,
    "scale": lambda x, y, w: x * w[0],
    "divide": lambda x, y, w: x / (1 + y.square()),
    "norm": lambda x, y, w: F.layer_norm(x, (4,)) + y,
    "root": lambda x, y, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "join": lambda x, y, w: torch.cat([x, y], -1)[:, 2:6],
    "reduce": lambda x, y, w: x.sum(-1, keepdim=True) * y,
    "choose": lambda x, y, w: torch.where(x > 0, x, y),
    "turn": lambda x, y, w: torch.roll(y, 1, 0) + x,
}


@pytest.mark.long
@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 4)), min_size=1, max_size=8),
    st.sampled_from(["bf16", "fp16"]),
)
def test_dtypes_of_random_models(steps: list[tuple[str, int]], low: str) -> None:
    def model(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values = [x]
        for k, (name, back) in enumerate(steps):
            values.append(STEPS[name](values[-1], values[max(0, len(values) - 1 - back)], (a, b)[k % 2]))
        return values[-1]

    args = (f(4, 4),)
    try:
        ours = rows(traced(Function(model, (4, 4), (4, 4)), args, f"{low}-O1"))
    except ValueError as error:
        assert "no parameter" in str(error)  # none is used
        return
    assert ours == rows(under_autocast(Function(model, (4, 4), (4, 4)), args, LOW[low]))


@functools.cache
def language_model(kind: str) -> nn.Module:
    import transformers as hf

    small = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}
    model = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                                            num_attention_heads=4, num_key_value_heads=2,
                                                            max_position_embeddings=16, **small)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0,
                                                         embd_pdrop=0, attn_pdrop=0, loss_type="ForCausalLM", **small)),
    }[kind]()  # fmt: skip

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    return Loss()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models_as_under_autocast(kind: str) -> None:
    """All ops but the mask, which the model makes in the dtype of its queries: an exception of the table."""
    model, args = language_model(kind), (i(2, 8, below=20),)
    ours, theirs = rows(traced(model, args, "bf16-O1")), rows(under_autocast(model, args, torch.bfloat16))
    differ = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert {a[1] for a, _ in differ} <= {"where.self"} and len(differ) <= 1
    wanted, gradients = eager(model, args, torch.bfloat16)
    found = run(model, Mesh(dp=2, tp=2), None, args, "bf16-O1")
    assert distance(found.returned[0], wanted[0]) <= 1e-3
    assert max(distance(found.gradients[name], gradient) for name, gradient in gradients.items()) <= 4e-2


# -- O2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if name != "powers"])
def test_parameters_in_low_precision_give_the_same_numbers(name: str) -> None:
    model, args = CASES[name]()
    wanted, gradients = eager(model, args)
    found = run(model, Mesh(dp=2, tp=2), None, args, "bf16-O2")
    assert all(distance(a, b) <= 3e-2 for a, b in zip(found.returned, wanted, strict=True))
    for parameter, gradient in gradients.items():
        if not (name == "batch norm" and parameter == "first.bias"):
            assert found.gradients[parameter].dtype == torch.float32
            assert distance(found.gradients[parameter], gradient) <= 6e-2, parameter


def test_parameters_of_norms_stay_wide() -> None:
    """And the residual stream is narrow."""
    model, args = CASES["transformer"]()
    program = traced(model, args, "fp16-O2")
    low = low_precision(program)
    wide = {name for name, _ in model.named_parameters()} - low.keys()
    assert wide == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert set(low.values()) == {torch.float16}
    assert re.search(r"add : f16\[2 4 8\] = add\.Tensor\(embedding, view_\d+\)", str(program))
    assert low_precision(traced(model, args, "fp16-O1")) == {}


def test_weights_of_llamas_norms_stay_wide() -> None:
    model, args = language_model("llama"), (i(2, 8, below=20),)
    low = low_precision(traced(model, args, "bf16-O2"))
    assert {name for name, _ in model.named_parameters() if name not in low} == {
        "model.model.layers.0.input_layernorm.weight", "model.model.layers.0.post_attention_layernorm.weight",
        "model.model.norm.weight",
    }  # fmt: skip


def test_gradients_leave_as_asked() -> None:
    model, args = CASES["transformer"]()
    for gradients, wanted in (("f32", {"f32"}), ("compute", {"f32", "bf16"})):
        found = run(model, Mesh(dp=2), None, args, "bf16-O2", gradients=gradients)
        assert {DTYPE_NAMES[gradient.dtype] for gradient in found.gradients.values()} == wanted


# -- transfers ---------------------------------------------------------------------------------------------------


def moved(program: Program) -> dict[str, list[str]]:
    """Reductions and gathers → the dtypes of what they move."""
    found: dict[str, list[str]] = {}
    for node in program.nodes:
        row = BY_FUNCTION.get(node.target)
        if row is not None and row.collective:
            type = record_of(operands(node)[0]).type
            assert isinstance(type, TensorType)
            found.setdefault(row.name, []).append(DTYPE_NAMES[type.dtype])
    return found


def test_casts_stand_where_fewer_bytes_move() -> None:
    """Weights split over dp are gathered narrow; products are reduced narrow, and cast to the residual's dtype
    afterwards."""
    split = {f"*.{name}.weight": ("dp", None) for name in ("qkv", "out", "up", "down")}
    program = run(*reordered("transformer", Mesh(dp=2), split), "bf16-O1").program
    assert moved(program)["all_gather"] == ["bf16"] * 8
    program = run(*reordered("transformer", Mesh(tp=2), MEGATRON), "bf16-O1").program
    whole = [
        line.split(" : ")[1][:4]
        for line in str(program).splitlines()
        if re.search(r"\[2 4 8\] = all_reduce\(view_", line)
    ]
    assert whole == ["bf16"] * 5  # two forward, three backward


def test_what_is_expanded_runs_in_the_dtype_that_was_required() -> None:
    """The cross-entropy of classes that are split: its parts are float32, of logits that are cast once."""
    text = str(run(*reordered("transformer", Mesh(tp=2), MEGATRON), "bf16-O1").program)
    logits = re.search(r"amax : f32\[8 1\] \+max:tp = amax\((\w+)_float32, \[1\], True\)", text)
    assert logits and f"sub : f32[8 11/tp] = sub.Tensor({logits[1]}_float32, amax_tp)" in text
    assert "gather_held : f32[8 1] +tp = autopar::gather_held(sub_1" in text and f"_to_copy({logits[1]}" not in text


def reordered(name: str, mesh: Mesh, plan: Any) -> tuple[Any, ...]:
    model, args = CASES[name]()
    return model, mesh, plan, args


def test_reductions_are_wide_where_that_is_asked() -> None:
    model, args = CASES["transformer"]()
    narrow, wide = (run(model, Mesh(dp=2, tp=2), MEGATRON, args, "bf16-O1", passes) for passes in ((), (Widen(),)))
    assert "bf16" in moved(narrow.program)["all_reduce"]
    assert set(moved(wide.program)["all_reduce"]) == {"f32", "i64"}, "of counts of labels, the integers"
    assert all(distance(wide.gradients[name], gradient) <= NOISE["bf16"] for name, gradient in narrow.gradients.items())


def test_a_value_is_cast_once_and_kept() -> None:
    """For three products, forward and backward; a parameter is cast in each phase, for it is there anyway."""
    model = Function(lambda x, a, b, c: (x * 2) @ a + (x * 2) @ b + (x * 2).relu() @ c, (8, 8), (8, 8), (8, 8))
    text = str(run(model, Mesh(dp=2), None, (f(4, 8),), "bf16-O1").program)
    assert text.count("= cast(mul, bf16)") == 1 and text.count("= cast(mul_1, bf16)") == 1
    assert text.count("= cast(weights_0, bf16)") == 1


# -- what stays, what is refused ---------------------------------------------------------------------------------


def test_casts_of_the_model_stay() -> None:
    model = Function(lambda x, a: ((x @ a).half().float() * x.to(torch.bfloat16)).double().sum(-1), (8, 8))
    text = str(traced(model, (f(5, 8),), "bf16-O1"))
    assert "_to_copy : f16[5 8] = _to_copy(mm, dtype=f16)" in text
    assert "_to_copy_1 : f32[5 8] = _to_copy(_to_copy, dtype=f32)" in text
    assert "sum_1 : f64[5] = sum.dim_IntList(_to_copy_3, [-1])" in text


def test_numbers_that_are_no_floats_stay() -> None:
    model = Function(lambda ids, a: a[ids.clamp(max=3)].masked_fill((ids > 2).unsqueeze(-1), 0) @ a, (5, 5))
    before, after = (str(traced(model, (i(6),), amp)).splitlines() for amp in (None, "bf16-O1"))
    assert [line for line in before if "i64" in line or "bool" in line] == [
        line for line in after if "i64" in line or "bool" in line
    ]


def test_tables_of_indices_stay_wide() -> None:
    """Products of buffers and places, as the angles of rotary embeddings are."""

    class Rotary(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.rand(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            angles = torch.arange(x.shape[1]).float()[:, None] @ self.frequencies
            return super().forward(x * torch.cat([angles.cos(), angles.sin()], -1))

    for amp in ("bf16-O1", "bf16-O2"):
        assert re.search(r" mm : f32\[4 4\] = mm\(\w+, \w+\)", str(traced(Rotary(), (f(2, 4, 8),), amp)))


def test_without_a_policy_nothing_changes() -> None:
    model, args = CASES["transformer"]()
    assert traced(model, args, None) == capture(model, args).program


def test_what_was_decided_is_told() -> None:
    from autopar.passes import run_passes
    from autopar.passes.amp import Amp

    (report,) = run_passes(capture(*CASES["gated"]()).program, [Amp("bf16-O2")])
    assert report.notes == ("bf16-O2: 18 ops run in bf16; 3 parameters are bf16",)
    assert (report.commits, report.inserted) == (1, 0)


def test_ops_can_be_kept_in_float32() -> None:
    model, args = CASES["gated"]()
    for keep in ({"aten::silu": "f32"}, {"silu": "f32"}):
        text = str(traced(model, args, "bf16-O1", keep=keep))
        assert "silu : f32[5 8] = silu(mm as f32)" in text and re.search(
            r"silu_backward : f32\[5 8\] = silu_backward\(\w+, mm as f32\)", text
        )
    product = Function(lambda x, a: x * a, (5, 8))
    backward = str(traced(product, (f(5, 8),), "bf16-O1", keep={"aten::mul": "bf16"})).partition("backward:")[2]
    assert "mul_1 : bf16[5 8] = mul.Tensor(d_out, inputs as bf16)" in backward
    assert "mm : f32[5 8] = mm(x, t)" in str(traced(model, args, "bf16-O1", keep={"mm": "f32"}))


@pytest.mark.parametrize(
    ("amp", "options", "error", "text"),
    [
        ("bf16-O3", {}, ValueError, "no amp='bf16-O3'; near it: bf16-O2, bf16-O1"),
        ("half", {}, ValueError, "no amp='half'; there are: bf16-O1, fp16-O1, bf16-O2, fp16-O2, bf16, fp16, None"),
        (16, {}, ValueError, "no amp=16; there are: bf16-O1, fp16-O1, bf16-O2, fp16-O2, bf16, fp16, None"),
        (
            "bf16",
            {"keep": {"silly": "f32"}},
            RuleError,
            "torch has no op 'silly'; write it as 'add.Tensor' or 'library::op'",
        ),
        (
            "bf16",
            {"keep": {"silu": "f16"}},
            ValueError,
            "keep={'aten::silu': 'f16'}: with bf16-O1 an op runs in 'f32' or 'bf16'",
        ),
        (
            "bf16",
            {"keep": {"_softmax": "bf16"}},
            ValueError,
            "keep={'aten::_softmax': 'bf16'}: its backward names the dtype that it was captured in",
        ),
        ("bf16", {"gradients": "bf16"}, ValueError, "no gradients='bf16'; they leave in one of f32, compute"),
    ],
)
def test_unknown_spellings_are_refused(amp: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        traced(nn.Linear(4, 4), (f(2, 4),), amp, **options)


@pytest.mark.parametrize(
    ("model", "args", "text"),
    [
        (
            nn.Linear(4, 4).double(),
            (f(2, 4).double(),),
            "amp='bf16-O1' is for a model and data in float32; the parameter weight is f64\n  make it float32: "
            "model.float(); or leave amp=None",
        ),
        (nn.Linear(4, 4).bfloat16(), (f(2, 4).bfloat16(),), "the parameter weight is bf16\n"),
        (Function(lambda x, a: x.float() @ a, (4, 4)), (f(2, 4).double(),), "the input inputs is f64\n"),
        (Function(lambda x, a: x.real @ a, (4, 4)), (f(2, 4).cfloat(),), "the input inputs is c64\n"),
    ],
)
def test_models_in_other_dtypes_are_refused(model: nn.Module, args: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        traced(model, args, "bf16")


def test_ops_without_a_kernel_are_refused_with_their_line() -> None:
    model = Function(lambda x, a: torch.special.erfcx(x @ a), (4, 4))
    with pytest.raises(PrecisionError) as caught:
        traced(model, (f(2, 4),), "fp16-O1")
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "aten::special_erfcx has no kernel for f16 on cpu",
        "special_erfcx : f32[2 4] = special_erfcx(mm)",
    ] or lines[1].endswith("special_erfcx(mm)")
    assert "torch.special.erfcx(x @ a)" in lines[2]
    assert lines[3] == "  run it in float32: keep={'aten::special_erfcx': 'f32'}"
    assert "special_erfcx : f32[2 4] = special_erfcx(mm as f32)" in str(
        traced(model, (f(2, 4),), "fp16-O1", keep={"aten::special_erfcx": "f32"})
    )
