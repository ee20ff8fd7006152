"""Losses that stay whole ops. Means are taken apart at capture, so only sums and per-element losses are left."""

from __future__ import annotations

from autopar.rules.registry import rule

NONE, SUM = 0, 2  # torch's numbers for a loss's reduction; 1 is the mean


# element by element: what is left of them when the sum or the mean is taken apart
rule("..., ... -> ...", "smooth_l1_loss huber_loss soft_margin_loss")
rule("..., ..., ... -> ...", "smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward", linear="0")
rule("..., ..., ... -> ...", "binary_cross_entropy")
rule("..., ..., ..., ... -> ...", "binary_cross_entropy_backward", linear="0")
rule("..., ..., ..., ... -> ...", "binary_cross_entropy_with_logits")


def _dims(scores) -> tuple[str, str]:
    """The factors of scores and targets: classes alone, a batch of them, or a batch with places of its own."""
    places = " ".join(f"d{k}" for k in range(len(scores.shape) - 2))
    return ("c!", "()") if len(scores.shape) == 1 else (f"b c! {places}", f"b {places}")


def _nll(scores, target, weight, reduction: int, *_) -> str:
    scored, targets = _dims(scores)
    return f"{scored}, {targets}, c! -> {targets if reduction == NONE else '()'}, ()"


def _nll_backward(gradient, scores, target, weight, reduction: int, *_) -> str:
    scored, targets = _dims(scores)
    return f"{targets if reduction == NONE else '()'}, {scored}, {targets}, c!, () -> {scored}"


rule(_nll, "nll_loss_forward nll_loss2d_forward")
rule(_nll_backward, "nll_loss_backward nll_loss2d_backward", linear="0")
