"""Gather the calls that rules are proven on: for every op of the tables, with real tensors, some."""

from __future__ import annotations

from operands import Call
from rule_calls_convolution import CONVOLUTION
from rule_calls_factories import FACTORIES
from rule_calls_indexing import INDEXING
from rule_calls_loss import LOSS
from rule_calls_matmul import MATMUL
from rule_calls_normalization import NORMALIZATION
from rule_calls_pointwise import POINTWISE
from rule_calls_reduction import REDUCTION
from rule_calls_views import REGROUPING

FAMILIES = (POINTWISE, MATMUL, REDUCTION, NORMALIZATION, CONVOLUTION, LOSS, INDEXING, REGROUPING, FACTORIES)

TABLE: dict[str, list[Call]] = {}
for family in FAMILIES:
    for names, calls in family:
        for name in names.split():
            TABLE.setdefault(name, []).extend(calls)
