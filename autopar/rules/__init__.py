"""Define how every op can be sharded, one line an op. Importing this package loads the tables."""

from autopar.ir.ops import assumptions, over_stages, sharded_lookup, sum_of_squares  # noqa: F401  # they register ops that have rules
from autopar.optimizers.own_ops import on_new_op
from autopar.rules import (  # noqa: F401
    attention,
    convolution,
    embedding,
    factories,
    linalg,
    loss,
    matmul,
    normalization,
    optimizers,
    pointwise,
    random,
    reduction,
    selection,
    views,
)
from autopar.rules.binding import bind
from autopar.rules.registry import RULES, Rule, find_rule, register_rule, rule
from autopar.rules.strategies import Bound, Strategy


def _rule_of_a_step(op: str, alike: int, numbers: int, results: int) -> None:
    """Register the rule of an optimizer's step, an op that is made when it is first needed."""
    operands = ", ".join(["..."] * alike + ["()"] * numbers)
    rule(f"{operands} -> {', '.join(['...'] * results)}" if alike else (lambda *args, **kwargs: None), op)


on_new_op(_rule_of_a_step)

__all__ = ["RULES", "Bound", "Rule", "Strategy", "bind", "find_rule", "register_rule", "rule"]
