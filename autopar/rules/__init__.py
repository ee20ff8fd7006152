"""Sharding rules: what every op allows, one line an op. Importing this package loads the tables."""

from autopar import held, squares  # noqa: F401  # they register ops that have rules
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
from autopar.rules.binding import Bound, Strategy, bind
from autopar.rules.registry import RULES, Rule, find_rule, register_rule, rule

__all__ = ["RULES", "Bound", "Rule", "Strategy", "bind", "find_rule", "register_rule", "rule"]
