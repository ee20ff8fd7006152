"""Shard look-ups along one dim of a tensor, and their reverse.

The indexed dim stays whole unless the op gets the held indices.
"""

from __future__ import annotations

from autopar.rules import indexing as by
from autopar.rules.registry import rule

rule("v! d, ... -> ... d", "embedding", linear="0")
rule(by.embedding_backward, "embedding_dense_backward", linear="0", sizes={2: 0})
rule(by.index_select, "index_select", linear="0")
rule(by.index_add, "index_add", linear="0+2")
rule(by.gather, "gather", linear="0")
rule(by.scatter_value, "scatter.value")
rule(by.scatter, "scatter.src", linear="0+2")
rule(by.scatter_add, "scatter_add", linear="0+2")
rule(by.index_tensor, "index.Tensor", linear="0")
rule(by.index_put, "index_put", linear=lambda x, indices, *_: f"0+{1 + len(indices)}")

# a look-up that gets the held rows can be split along them (``autopar.ir.ops.sharded_lookup``)
rule("v d, ..., v -> ... d", "autopar::look_up", linear="0")
rule("... d, ..., v -> v d", "autopar::look_up_backward", linear="0")
rule("... -> ...", "autopar::within")
rule(by.gather_held, "autopar::gather_held", linear="0")
rule(by.scatter_held, "autopar::scatter_held", linear="0")
rule("..., () -> ...", "autopar::assumed")
