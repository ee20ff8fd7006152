"""Fused cells of recurrent nets. Batch and hidden units come apart; the gates of a unit stay together."""

from __future__ import annotations

from autopar.rules.registry import rule

GATES = "n (four! h)"
rule(lambda *_: (f"{GATES}, {GATES}, n h, (four! h), (four! h) -> n h, n h, {GATES}", {"four": 4}), "_thnn_fused_lstm_cell")
rule(lambda *_: (f"n h, n h, n h, n h, {GATES} -> {GATES}, n h, (four! h)", {"four": 4}), "_thnn_fused_lstm_cell_backward_impl", linear="0+1")
