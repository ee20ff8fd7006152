"""Give calls of losses and of their backwards."""

from __future__ import annotations

from operands import SHAPES, Call, Calls, F, I, P, call

NONE, SUM = 0, 2


def nll(reduction: int, ignore: int, weight: bool, *shape: int, below: int = 6) -> Call:
    """Scores of 6 classes at dim 1 (at dim 0 where there is no batch)."""
    scores = (shape[0], 6, *shape[1:]) if shape else (6,)
    return call(F(*scores), I(*shape, below=below), P(6) if weight else None, reduction, ignore)


def nll_backward(reduction: int, ignore: int, weight: bool, *shape: int) -> Call:
    """Classes below 2 are in every piece of the classes: torch does not look at the bounds here."""
    (scores, target, weights, *rest), _ = nll(reduction, ignore, weight, *shape, below=2)
    return call(F(*shape) if reduction == NONE else F(), scores, target, weights, *rest, P())


NLL = [(reduction, ignore, weight, 5) for reduction in (NONE, SUM) for ignore in (-100, 1) for weight in (False, True)]
NLL_2D = [(reduction, ignore, weight, 4, 3, 2) for reduction, ignore, weight, _ in NLL]

LOSS: Calls = [
    ("smooth_l1_loss huber_loss", [call(F(*s), F(*s), NONE, 0.7) for s in SHAPES]),
    ("soft_margin_loss", [call(F(*s), F(*s), NONE) for s in SHAPES]),
    ("smooth_l1_loss_backward "
     "huber_loss_backward",
     [call(F(), F(4, 5), F(4, 5), NONE, 0.7), *(call(F(*s), F(*s), F(*s), NONE, 0.7) for s in SHAPES)]),
    ("soft_margin_loss_backward",
     [call(F(), F(4, 5), F(4, 5), NONE), *(call(F(*s), F(*s), F(*s), NONE) for s in SHAPES)]),
    ("binary_cross_entropy",
     [call(P(4, 5), P(4, 5), None, NONE), call(P(4, 5), P(4, 5), P(5), NONE), call(P(6), P(6), P(6), NONE)]),
    ("binary_cross_entropy_backward",
     [call(F(*g), P(4, 5), P(4, 5), w, NONE) for g in ((), (4, 5)) for w in (None, P(4, 5), P(4, 1))]),
    ("binary_cross_entropy_with_logits",
     [call(F(4, 5), P(4, 5), w, v, NONE) for w in (None, P(5)) for v in (None, P(5), P(4, 5))]),
    ("nll_loss_forward", [*(nll(*row) for row in NLL), nll(NONE, -100, True), nll(SUM, 2, False)]),
    ("nll_loss_backward",
     [*(nll_backward(*row) for row in NLL), nll_backward(NONE, -100, True), nll_backward(SUM, 0, False)]),
    ("nll_loss2d_forward", [nll(*row) for row in NLL_2D]),
    ("nll_loss2d_backward", [nll_backward(*row) for row in NLL_2D]),
]  # fmt: skip
