"""List the ops of ``torch.autocast`` by the names that they have in a captured program.

torch's own lists (``ATen/autocast_mode.h`` and the dispatcher's kernels for ``AutocastCPU`` and ``AutocastCUDA``, torch
2.11 to 2.15; documented as "CPU Ops that autocast to …", "CUDA Ops that …") name ops as models call them. A captured
program has the ops that these consist of: ``linear`` is ``addmm`` or ``mm``, ``conv2d`` is ``convolution``,
``cross_entropy_loss`` is ``_log_softmax`` and ``nll_loss_forward``. Overloads are not distinguished.
"""

from __future__ import annotations

from autopar.torch_private import names_present as named

_PRODUCTS = """
    mm addmm bmm baddbmm addbmm mv addmv dot _addmm_activation convolution conv_tbc _prelu_kernel
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
"""
_LOSSES = """
    nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss multi_margin_loss
    multilabel_margin_loss_forward binary_cross_entropy_with_logits binary_cross_entropy
    _cdist_forward
"""
_MATRICES = "linalg_matrix_sqrth "  # since 2.14
_COMPLEX = "complex polar view_as_complex "  # complex dtypes have no low precision

LOW: dict[str, frozenset[str]] = {  # in low precision
    "cpu": named(_PRODUCTS + "mkldnn_rnn_layer"),
    "cuda": named(_PRODUCTS + "addr _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_rnn"),
}

F32: dict[str, frozenset[str]] = {  # in float32
    "cpu": named(_LOSSES + _COMPLEX + _MATRICES + """
        avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices fractional_max_pool2d
        fractional_max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d
        replication_pad2d replication_pad3d grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback _ctc_loss
        fake_quantize_per_tensor_affine_cachemask prod trace _fft_c2c _fft_r2c _fft_c2r cholesky cholesky_inverse
        cholesky_solve linalg_cholesky_ex linalg_eig linalg_eigvals _linalg_eigh _linalg_svd linalg_householder_product
        linalg_inv_ex linalg_lstsq linalg_qr _linalg_solve_ex linalg_lu_factor_ex linalg_lu_solve lu_solve _lu_with_info
        geqrf orgqr ormqr triangular_solve linalg_solve_triangular
    """),
    "cuda": named(_LOSSES + _COMPLEX + _MATRICES + """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
        native_layer_norm native_group_norm rms_norm _fused_rms_norm norm linalg_vector_norm dist _pdist_forward renorm
        logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
        upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa prod _softmax _log_softmax cumprod cumsum sum
    """),
}  # fmt: skip

WIDEST: dict[str, frozenset[str]] = {  # in the widest dtype of the operands, which ops that do not promote need
    "cpu": named("cat stack index_copy"),
    "cuda": named(
        "cat stack addcdiv addcmul atan2 linalg_cross _trilinear vdot grid_sampler_2d grid_sampler_3d index_put "
        "scatter_add"
    ),
}

EXCEPTIONS: dict[str, str] = {  # where the dtype of a captured program differs from that under torch.autocast, and why
    "casts to float32 in the "
    "model": "x.float() of a float32 value is no op in a capture; what follows it takes the dtype that x has",
    "Python code that reads x.dtype": "it was captured in float32: masks and tables that are made like x are float32",
    "autocast(enabled=False) inside the "
    "model": "a capture without autocast does not see it; what is computed of buffers and indices alone, as rotary "
    "tables, stays float32",
    "_softmax, _log_softmax, "
    "norms": "where autocast leaves them to low precision (on CPU), they are given float32 and seen in low precision: "
    "their backward names the captured dtype",
    "mean, var, batch "
    "norm": "taken apart at capture: sums in float32, where fp16 would overflow; seen in the dtype that the one op "
    "gives",
    "kl_div, l1_loss, cosine_similarity, "
    "…": "taken apart above the captured ops, so that only their exp, log, pow and sums are on the lists",
    "dot, mv": "matmul of vectors and torch.dot are the same captured op, which is in low precision",
    "math attention": "its scaling of queries that are float32 comes before they are cast",
    "casts of "
    "parameters": "autocast casts a parameter once a forward; gradients of its uses then add up in low precision, "
    "here in float32",
}
