"""Factorizations and solutions of matrices. Batches of them come apart, and the columns of a right-hand side."""

from __future__ import annotations

from autopar.rules.dims import broadcasting, tensor
from autopar.rules.registry import rule

rule("... i! j! -> ... i! j!", "cholesky cholesky_inverse linalg_matrix_exp", empty=False)
rule("... i! j! -> ... i! j!, ...", "linalg_cholesky_ex linalg_inv_ex", empty=False)
rule("... i! j! -> ..., ... i! j!, ... i!", "_linalg_det", empty=False)
rule("... i! j! -> ..., ..., ... i! j!, ... i!", "_linalg_slogdet", empty=False)
rule("... i! j! -> ... p! q!, ... r! s!", "linalg_qr", empty=False)
rule("... i! j! -> ... p! q!, ... r! s!, ... t! u!", "linalg_lu", empty=False)
rule("... i! j! -> ... i! j!, ... p!, ...", "linalg_lu_factor_ex", empty=False)
rule("... i! j! -> ... p!, ... q! r!", "linalg_eig", empty=False)
rule("... i! j!, ... t! -> ... i! j!", "linalg_householder_product", empty=False)
rule("... i! j!, ..., ... -> ... p! q!", "linalg_pinv.atol_rtol_tensor", empty=False)


def _vectors(pattern: str, bare: str, position: int):
    """Without vectors, torch gives tensors without elements in their place."""

    def bound(*args, **kwargs) -> str:
        wanted = args[position] if len(args) > position else True
        return pattern if wanted else bare

    bound.__doc__ = f"``{pattern}``; without vectors ``{bare}``."
    return bound


rule(_vectors("... i! j! -> ... p!, ... q! r!", "... i! j! -> ... p!, none!", 2), "_linalg_eigh", empty=False)
rule(_vectors("... i! j! -> ... p! q!, ... r!, ... s! t!", "... i! j! -> none!, ... r!, none!", 2), "_linalg_svd", empty=False)


def _solved(pattern: str, mirrored: str):
    """The columns of the right-hand side come apart; where the unknown stands on the left, its rows."""

    def bound(*_, left: bool = True, **__) -> str:
        return pattern if left else mirrored

    bound.__doc__ = f"``{pattern}``; where the unknown stands on the left ``{mirrored}``."
    return bound


rule(_solved("... i! j!, ... j! c -> ... j! c", "... i! j!, ... c j! -> ... c j!"), "linalg_solve_triangular", linear="1", empty=False)
rule(_solved("... i! j!, ... j!, ... j! c -> ... j! c", "... i! j!, ... j!, ... c j! -> ... c j!"), "linalg_lu_solve", linear="2", empty=False)
rule("... i! c, ... i! j! -> ... i! c", "cholesky_solve", linear="0", empty=False)
rule("... i! c!, ... i! j! -> ... i! c!, ... i! j!", "triangular_solve", empty=False)


def _solution(a, b, *, left: bool = True, **_) -> str:
    """The right-hand side is a matrix, or a vector for each. It stays whole: every rank would have all of the factorization."""
    side = "... i!" if b.shape == a.shape[:-1] else "... i! c!" if left else "... c! i!"
    return f"... i! j!, {side} -> {side}, ... i! j!, ... i!, ..."


rule(_solution, "_linalg_solve_ex", empty=False)


def _cross(x, y, *, dim: int = -1) -> str:
    """Vectors of three lie along ``dim``."""
    dims, sides = broadcasting(x.shape, y.shape)
    return f"{', '.join(sides)} -> {tensor(dims)}".replace(dims[dim], f"{dims[dim]}!")


rule(_cross, "linalg_cross", linear="0, 1")
