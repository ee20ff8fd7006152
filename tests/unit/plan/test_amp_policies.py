"""The tables of mixed precision: torch's own lists, op by op, and the kernels that there are; requirements in traced
programs."""

from __future__ import annotations

import re

import pytest
import torch
from operands import made
from rule_calls import TABLE

from autopar import Mesh
from autopar.errors import TextError, VerifyError
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement
from autopar.passes import pipeline, run_passes
from autopar.plan.precision.autocast import F32, LOW, WIDEST
from autopar.plan.precision.kernels import NO_KERNEL
from autopar.plan.precision.policy import INSIDE, POLICIES, PROMOTED, Kind, policy_of
from autopar.rules.registry import RULES, op_name
from autopar.torch_private import pytree
from autopar.verify.levels import verify

TAKEN = {  # what torch's lists name → the captured ops that it is made of, which are on the list of the same kind
    "linear": "addmm mm", "matmul": "mm bmm mv dot", "conv1d": "convolution", "conv2d": "convolution",
    "conv3d": "convolution", "_convolution": "convolution", "conv_transpose1d": "convolution",
    "conv_transpose2d": "convolution", "conv_transpose3d": "convolution",
    # made by convolution, below autocast
    "cudnn_convolution": "convolution", "cudnn_convolution_transpose": "convolution",
    "prelu": "_prelu_kernel",
    "scaled_dot_product_attention": "_scaled_dot_product_flash_attention_for_cpu "
                                    "_scaled_dot_product_efficient_attention bmm",
    "einsum": "bmm", "chain_matmul": "mm", "linalg_multi_dot": "mm", "lstm_cell": "addmm _thnn_fused_lstm_cell",
    "gru_cell": "addmm _thnn_fused_gru_cell", "rnn_tanh_cell": "addmm", "rnn_relu_cell": "addmm",
    "_native_multi_head_attention": "bmm addmm", "nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward",
    "multilabel_margin_loss": "multilabel_margin_loss_forward", "cross_entropy_loss": "nll_loss_forward",
    "cdist": "_cdist_forward", "ctc_loss": "_ctc_loss", "adaptive_avg_pool3d": "_adaptive_avg_pool3d",
    "max_pool3d": "max_pool3d_with_indices", "grid_sampler": "grid_sampler_2d grid_sampler_3d", "stack": "cat",
    "tensordot": "mm", "fake_quantize_per_tensor_affine": "fake_quantize_per_tensor_affine_cachemask",
    "stft": "_fft_r2c", "qr": "linalg_qr", "svd": "_linalg_svd", "inverse": "linalg_inv_ex", "pinverse": "_linalg_svd",
    "layer_norm": "native_layer_norm", "group_norm": "native_group_norm", "softmax": "_softmax",
    "log_softmax": "_log_softmax", "pdist": "_pdist_forward", "norm": "linalg_vector_norm",
    "frobenius_norm": "linalg_vector_norm", "linalg_matrix_norm": "linalg_vector_norm",
    "nuclear_norm": "linalg_vector_norm", "cross": "linalg_cross", "bilinear": "_trilinear",
    **{f"fft_{name}": "_fft_c2c _fft_r2c _fft_c2r" for name in ("fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn",
                                                                "ihfft", "irfft", "irfft2", "irfftn", "rfft", "rfft2",
                                                                "rfftn")},
    **{f"linalg_{name}": "_linalg_svd linalg_inv_ex" for name in ("cond", "matrix_rank", "svd", "svdvals",
                                                                  "tensorinv")},
    "linalg_cholesky": "linalg_cholesky_ex", "linalg_inv": "linalg_inv_ex", "linalg_solve": "_linalg_solve_ex",
    "linalg_tensorsolve": "_linalg_solve_ex", "linalg_eigh": "_linalg_eigh", "linalg_eigvalsh": "_linalg_eigh",
}  # fmt: skip
ABOVE = {  # taken apart by torch into ops of which some are on no list: precision.autocast.EXCEPTIONS
    "l1_loss", "kl_div", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "cosine_embedding_loss",
    "cosine_similarity", "poisson_nll_loss", "quantile", "nanquantile", "linalg_vecdot",
}  # fmt: skip
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def listed(device: str) -> set[str]:
    """The ops that torch's dispatcher has a kernel for under autocast."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    found = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, KEYS[device])}
    return {name.removeprefix("aten::").partition(".")[0] for name in found}


@pytest.mark.parametrize("device", KEYS)
def test_lists_are_those_of_torchs_dispatcher(device: str) -> None:
    tables = LOW[device] | F32[device] | WIDEST[device]
    for name in listed(device) - ABOVE:
        parts = {f"aten::{part}" for part in TAKEN.get(name, name).split()}
        assert parts & (tables | INSIDE), name


@pytest.mark.parametrize("device", KEYS)
def test_no_op_is_on_two_lists(device: str) -> None:
    assert not (LOW[device] & F32[device] or LOW[device] & WIDEST[device] or F32[device] & WIDEST[device])
    assert all(
        hasattr(torch.ops.aten, name.removeprefix("aten::"))
        for name in LOW[device] | F32[device] | WIDEST[device] | INSIDE | PROMOTED
    )


def test_kinds_by_policy_and_device() -> None:
    rows = {
        "aten::mm": ("LOW", "LOW", "LOW"),
        "aten::exp": ("WIDEST", "F32", "F32"),
        "aten::_softmax": ("INSIDE", "F32", "INSIDE"),
        "aten::native_layer_norm": ("INSIDE", "F32", "INSIDE"),
        "aten::mse_loss": ("F32", "F32", "F32"),
        "aten::sum.dim_IntList": ("WIDEST", "F32", "F32"),
        "aten::cat": ("WIDEST", "WIDEST", "WIDEST"),
        "aten::add.Tensor": ("PROMOTED", "PROMOTED", "PROMOTED"),
        "mylib::rope": ("WIDEST", "WIDEST", "WIDEST"),
    }
    first, second = POLICIES["bf16-O1"], POLICIES["bf16-O2"]
    assert {
        op: (first.kind(op, "cpu").name, first.kind(op, "cuda").name, second.kind(op, "cpu").name) for op in rows
    } == rows
    assert first.kind("aten::exp", "xpu") is Kind.F32


def test_names_and_aliases() -> None:
    assert (policy_of("bf16"), policy_of("fp16")) == (POLICIES["bf16-O1"], POLICIES["fp16-O1"])
    kept = policy_of("fp16", {"aten::silu": "f32", "add.Tensor": "f16"})
    assert (
        kept.kind("aten::silu", "cpu"),
        kept.kind("aten::add.Tensor", "cpu"),
        kept.kind("aten::add.Scalar", "cpu"),
    ) == (Kind.F32, Kind.LOW, Kind.PROMOTED)


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_are_missing_where_the_table_says(dtype: torch.dtype) -> None:
    """On the calls that rules are proven on; a few take statistics in float32 beside what is low."""
    ops = {op_name(op): op for op in RULES}
    missing, seen = NO_KERNEL["cpu", dtype], set()
    for name, specs in TABLE.items():
        if (
            name not in ops
            or ops[name].namespace != "aten"
            or name in ("_scaled_dot_product_flash_attention_for_cpu_backward", "_weight_norm_interface_backward")
        ):
            continue
        for spec in specs:
            call = made(spec, name)
            try:
                run(ops[name], call, torch.float32)
            except (RuntimeError, NotImplementedError):
                continue
            packet = f"aten::{name.partition('.')[0]}"
            if packet in missing:
                seen.add(packet)
                with pytest.raises((RuntimeError, NotImplementedError)):
                    run(ops[name], call, dtype)
            else:
                run(ops[name], call, dtype)
    assert len(seen) >= 5


def run(op: object, call: object, dtype: torch.dtype) -> None:
    def cast(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return dtype if value is torch.float64 else value

    args, kwargs = pytree.tree_map(cast, call)
    op(*args, **kwargs)


# -- dtypes that uses of a traced program require ------------------------------------------------------------------

HEAD = "program traced on dp=2\n  x : f32[8/dp 4] = input\n  w : f32[4 4] = param\nforward:\n"


def test_requirements_of_traced_programs_print_and_parse() -> None:
    text = (
        HEAD
        + "  mm : bf16[8 4] = mm(x as bf16, w as bf16)\n  add : f32[8 4] = add.Tensor(mm as f32, x)\n  return add as "
        "bf16\n"
    )
    program = Program.parse(text)
    verify(program)
    assert str(program) == text
    assert record_of(program.node("mm")).uses == (Requirement(None, torch.bfloat16),) * 2
    assert record_of(program.node("add")).uses == (Requirement(None, torch.float32), None)
    run_passes(program, pipeline())
    assert str(program).endswith(
        "forward:\n  x_bfloat16 : bf16[8/dp 4] = cast(x, bf16)\n  w_bfloat16 : bf16[4 4] = cast(w, bf16)\n"
        "  mm : bf16[8/dp 4] = mm(x_bfloat16, w_bfloat16)\n  mm_float32 : f32[8/dp 4] = cast(mm, f32)\n"
        "  add : f32[8/dp 4] = add.Tensor(mm_float32, x)\n  add_bfloat16 : bf16[8/dp 4] = cast(add, bf16)\n  return "
        "add_bfloat16\n"
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "relu(x as bf16[8 4])",
            "line 5: a use in a traced program requires a dtype alone, as in 'x as bf16': place decides its Layout",
        ),
        (
            "relu(x as [8 4])",
            "line 5: only ops and results of placed and explicit programs require a Layout with 'as'; transfers "
            "accept any Layout",
        ),
        ("relu(x as bf17)", "line 5: no dtype 'bf17'; dtypes are f64, f32"),
    ],
)
def test_requirements_that_cannot_be_read(line: str, text: str) -> None:
    with pytest.raises(TextError, match=re.escape(text)):
        Program.parse(HEAD + f"  y : bf16[8 4] = {line}\n")


def test_requirements_fit_their_level() -> None:
    program = Program.parse(HEAD + "  y : f32[8 4] = relu(x)\n  return y\n")
    layout = Layout(Mesh(dp=2), DistAttr.replicated(2))
    with program.edit() as edit:
        edit.annotate(program.node("y"), uses=(Requirement(layout, torch.float32),))
    with pytest.raises(VerifyError, match="a use in a traced program requires a dtype alone; place decides its Layout"):
        verify(program)
    with program.edit() as edit:
        edit.annotate(program.node("y"), uses=(None, None))
    with pytest.raises(VerifyError, match="1 operands, but 2 requirements: every use has one, or none has"):
        verify(program)
    placed = Program.parse(
        "program placed on dp=2\n  x : f32[8/dp 4] = input\nforward:\n  y : f32[8/dp 4] = relu(x)\n  return y\n"
    )
    with placed.edit() as edit:
        edit.annotate(placed.node("y"), uses=(Requirement(None, torch.float32),))
    with pytest.raises(VerifyError, match="the use of x requires a dtype alone; place gives it a Layout"):
        verify(placed)


def test_what_is_narrowed_is_reduced_first() -> None:
    """A pending value is not passed on where a use rounds it: it would be reduced, and made pending again."""
    program = Program.parse(
        "program traced on tp=2\n  x : f32[8 4/tp] = input\n  w : f32[4/tp 4] = param\n  v : bf16[4 8] = "
        "input\nforward:\n"
        "  mm : f32[8 4] = mm(x, w)\n  t : bf16[4 8] = t(mm as bf16)\n  add : bf16[4 8] = add.Tensor(t, v)\n  return "
        "add\n"
    )
    run_passes(program, pipeline())
    assert (
        "  mm_tp : f32[8 4] = all_reduce(mm, tp)\n  mm_tp_bfloat16 : bf16[8 4] = cast(mm_tp, bf16)\n  t : bf16[4 8] = "
        "t(mm_tp_bfloat16)\n" in str(program)
    )
    assert "pend(" not in str(program)
