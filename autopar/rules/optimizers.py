"""The steps of optimizers (``autopar.optimizers``): element by element. Step counts, scales and learning rates are the same everywhere."""

from __future__ import annotations

from autopar.optimizers.ops import SIGNATURES
from autopar.rules.registry import rule

for name, (lying, without_dims, _) in SIGNATURES.items():
    states, scalars = lying.split(), [*without_dims.split(), "lr", "grad_scale", "found_inf"]
    operands = ["..."] * (2 + len(states)) + ["()"] * len(scalars)
    rule(f"{', '.join(operands)} -> {', '.join(['...'] * (1 + len(states)))}", f"autopar::{name}")

rule("(), () -> ()", "autopar::counted")
