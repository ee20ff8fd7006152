"""Shard the steps of optimizers (``autopar.optimizers``) element by element.

Step counts, scales and scheduled numbers are the same on all ranks.
"""

from __future__ import annotations

from autopar.optimizers.ops import SIGNATURES, scheduled_of
from autopar.rules.registry import rule

for name, (sharded, without_dims, _) in SIGNATURES.items():
    states, scalars = sharded.split(), [*without_dims.split(), "lr", "grad_scale", "found_inf", *scheduled_of(name)]
    operands = ["..."] * (2 + len(states)) + ["()"] * len(scalars)
    rule(f"{', '.join(operands)} -> {', '.join(['...'] * (1 + len(states)))}", f"autopar::{name}")

rule("(), () -> ()", "autopar::counted")
rule("..., ..., (), () -> ...", "autopar::averaged")
