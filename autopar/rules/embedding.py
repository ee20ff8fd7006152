"""Look-ups in a table. The vocabulary stays whole."""

from __future__ import annotations

from autopar.rules.registry import rule

rule("v! d, ... -> ... d", "embedding", linear="0")
rule("... d, ... -> v! d", "embedding_dense_backward", linear="0", sizes={2: 0})
