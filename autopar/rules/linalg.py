"""Shard factorizations and solutions of matrices by batch, and Fourier transforms by other dims.

Right-hand sides are sharded by columns.
"""

from __future__ import annotations

from autopar.rules import forms as to
from autopar.rules.dims import along
from autopar.rules.registry import rule

# work is written where it is a closed form: not for iterative methods (eigenvalues, singular values), factorizations of
# rectangles, and Fourier transforms
rule("... i! j! -> ... i! j!", "cholesky", empty=False, work="1/3 ... i i j")
rule("... i! j! -> ... i! j!", "cholesky_inverse", empty=False, work="2/3 ... i i j")
rule("... i! j! -> ... i! j!", "linalg_matrix_exp", empty=False)
rule("... i! j! -> ... i! j!, ...", "linalg_cholesky_ex", empty=False, work="1/3 ... i i j")
rule("... i! j! -> ... i! j!, ...", "linalg_inv_ex", empty=False, work="2 ... i i j")
rule("... i! j! -> ..., ... i! j!, ... i!", "_linalg_det", empty=False, work="2/3 ... i i j")
rule("... i! j! -> ..., ..., ... i! j!, ... i!", "_linalg_slogdet", empty=False, work="2/3 ... i i j")
rule("... i! j! -> ... p! q!, ... r! s!", "linalg_qr", empty=False)
rule("... i! j! -> ... p! q!, ... r! s!, ... t! u!", "linalg_lu", empty=False)
rule("... i! j! -> ... i! j!, ... p!, ...", "linalg_lu_factor_ex", empty=False)
rule("... i! j! -> ... p!, ... q! r!", "linalg_eig", empty=False)
rule("... i! j!, ... t! -> ... i! j!", "linalg_householder_product", empty=False)
rule("... i! j!, ..., ... -> ... p! q!", "linalg_pinv.atol_rtol_tensor", empty=False)
rule(to.vectors("... i! j! -> ... p!, ... q! r!", "... i! j! -> ... p!, none!", 2), "_linalg_eigh", empty=False)
rule(
    to.vectors("... i! j! -> ... p! q!, ... r!, ... s! t!", "... i! j! -> none!, ... r!, none!", 2),
    "_linalg_svd",
    empty=False,
)

rule(
    to.solved("... i! j!, ... j! c -> ... j! c", "... i! j!, ... c j! -> ... c j!"),
    "linalg_solve_triangular", linear="1", empty=False, work="... i j c",
)  # fmt: skip
rule(
    to.solved("... i! j!, ... j!, ... j! c -> ... j! c", "... i! j!, ... j!, ... c j! -> ... c j!"),
    "linalg_lu_solve", linear="2", empty=False, work="2 ... i j c",
)  # fmt: skip
rule("... i! c, ... i! j! -> ... i! c", "cholesky_solve", linear="0", empty=False, work="2 ... i j c")
rule("... i! c!, ... i! j! -> ... i! c!, ... i! j!", "triangular_solve", empty=False, work="... i j c")
rule(to.solution, "_linalg_solve_ex", empty=False, work=to.solution_work)
rule(to.cross, "linalg_cross", linear="0, 1")

# the transformed dims stay whole
rule(along("whole -> whole", 1), "_fft_c2c", linear="0", empty=False)
rule(along("whole -> part", 1), "_fft_r2c _fft_c2r", linear="0", empty=False)
