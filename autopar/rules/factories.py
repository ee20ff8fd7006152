"""Shard ops that make constant tensors. If one value fills the result, it can be split in any way."""

from __future__ import annotations

from autopar.rules.dims import names, tensor
from autopar.rules.registry import rule


def _factory(size, *_, **__) -> str:
    return f"-> {tensor(names(len(size)))}"


rule(_factory, "full zeros ones", sizes={0: "*"})
rule("... -> ...", "zeros_like ones_like full_like")
rule("-> ()", "scalar_tensor")
rule("-> d!", "arange arange.start arange.start_step linspace logspace")
rule("(), () -> d!", "linspace.Tensor_Tensor logspace.Tensor_Tensor")
rule("() -> d!", "linspace.Tensor_Scalar linspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor")
rule("-> rows! columns!", "eye eye.m")
rule("-> which! places!", "tril_indices triu_indices")
