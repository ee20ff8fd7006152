"""Losses that stay whole ops. Means are taken apart at capture, so only sums and per-element losses are left."""

from __future__ import annotations

from autopar.rules.registry import rule

NONE, SUM = 0, 2  # torch's numbers for a loss's reduction; 1 is the mean


def _nll(scores, target, weight, reduction: int, *_) -> str:
    scored, targets = ("b c!", "b") if len(scores.shape) == 2 else ("c!", "()")
    return f"{scored}, {targets}, c! -> {targets if reduction == NONE else '()'}, ()"


def _nll_backward(gradient, scores, target, weight, reduction: int, *_) -> str:
    scored, targets = ("b c!", "b") if len(scores.shape) == 2 else ("c!", "()")
    return f"{targets if reduction == NONE else '()'}, {scored}, {targets}, c!, () -> {scored}"


rule(_nll, "nll_loss_forward")
rule(_nll_backward, "nll_loss_backward", linear="0")
