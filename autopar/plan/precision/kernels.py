"""Refuse ops that have no CPU kernel for low precision, with the user's line, before anything runs.

The table comes from running every op of torch's own samples in both dtypes, on torch 2.13. There is no table for
accelerators; there the op itself raises when it runs.
"""

from __future__ import annotations

import torch

from autopar.errors import PrecisionError, at_line
from autopar.ir.nodes import called_op, is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES
from autopar.ir.text.printer import print_node
from autopar.plan.precision.dtypes import Dtypes
from autopar.torch_private import names_present as named

_NEITHER = named("""
    _cdist_forward _cdist_backward _pdist_forward _pdist_backward _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet
    _linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_qr
    linalg_solve_triangular cholesky cholesky_inverse cholesky_solve geqrf ormqr triangular_solve polar avg_pool3d
    avg_pool3d_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_erfcx special_log_ndtr special_ndtri
    special_zeta special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
""")  # fmt: skip

NO_KERNEL: dict[tuple[str, torch.dtype], frozenset[str]] = {
    ("cpu", torch.float16): _NEITHER,
    ("cpu", torch.bfloat16): _NEITHER | named("complex view_as_complex"),
}


def check_kernels(program: Program, dtypes: Dtypes) -> None:
    """Raise ``PrecisionError`` for the first op without a kernel for its dtype. Linear in the graph."""
    low = dtypes.policy.low
    missing = NO_KERNEL.get((dtypes.device, low), frozenset())
    for node in program.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        name = called_op(node).name().partition(".")[0]
        if name in missing and low in (
            want or dtypes.made[value] for value, want in zip(operands(node), dtypes.uses[node], strict=True)
        ):
            record = record_of(node)
            op = name if record.call is None else record.call.op
            other = (
                ""
                if low is torch.bfloat16 or name in NO_KERNEL[dtypes.device, torch.bfloat16]
                else '; or amp="bf16-O1", for which it has one'
            )
            raise PrecisionError(
                f"{name} has no kernel for {DTYPE_NAMES[low]} on {dtypes.device}\n  "
                f"{print_node(program, node).strip()}\n{at_line(record.source, record.module)}\n"
                f"  run it in float32: keep={{{op!r}: 'f32'}}{other}"
            )
