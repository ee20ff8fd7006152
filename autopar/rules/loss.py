"""Shard losses that remain whole ops: sums and losses per element. Capture decomposes means."""

from __future__ import annotations

from autopar.rules import indexing as by
from autopar.rules.registry import rule

# element by element: what remains after the sum or the mean has been decomposed
rule("..., ... -> ...", "smooth_l1_loss huber_loss soft_margin_loss")
rule("..., ..., ... -> ...", "smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward", linear="0")
rule("..., ..., ... -> ...", "binary_cross_entropy")
rule("..., ..., ..., ... -> ...", "binary_cross_entropy_backward", linear="0")
rule("..., ..., ..., ... -> ...", "binary_cross_entropy_with_logits")

rule(by.nll_loss, "nll_loss_forward nll_loss2d_forward")
rule(by.nll_loss_backward, "nll_loss_backward nll_loss2d_backward", linear="0")
rule(by.multilabel_margin_loss_backward, "multilabel_margin_loss_backward", linear="0")
rule(by.multi_margin_loss_backward, "multi_margin_loss_backward", linear="0")
