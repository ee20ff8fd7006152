"""Shard softmax, running sums, layer norm and group norm.

The dims of the normalization or the running sum stay whole.
"""

from __future__ import annotations

from autopar.rules import forms as to
from autopar.rules.dims import along
from autopar.rules.registry import rule

rule(along("whole -> whole", 1), "_softmax _log_softmax _safe_softmax cumprod logcumsumexp")
rule(along("whole -> whole", 1), "cumsum", linear="0")
rule(along("whole, whole -> whole", 2), "_softmax_backward_data _log_softmax_backward_data", linear="0")

rule(to.layer_norm("... k, k, k", "... k, ... 1, ... 1", 1), "native_layer_norm")
rule(to.layer_norm("... k, ... k, ... 1, ... 1, k, k", "... k, k, k", 2), "native_layer_norm_backward", linear="0")
rule(to.layer_norm("... k, k", "... k, ... 1", 1), "_fused_rms_norm")
rule(to.layer_norm("... k, ... k, ... 1, k", "... k, k", 2), "_fused_rms_norm_backward", linear="0")

GROUPS = {3: "n", 4: "g c", 6: "g"}
rule(to.group_norm("image, (g c!), (g c!)", "image, n g, n g", 0), "native_group_norm", sizes=GROUPS, empty=False)
rule(
    to.group_norm("image, image, n g, n g, (g c!)", "image, (g c!), (g c!)", 1),
    "native_group_norm_backward",
    linear="0",
    sizes={k + 2: size for k, size in GROUPS.items()},
    empty=False,
)

rule(to.weight_norm("v, g", "v, g", 0, 2), "_weight_norm_interface", empty=False)
rule(to.weight_norm("v, v, g, g", "v, g", 1, 4), "_weight_norm_interface_backward", linear="0", empty=False)
rule(to.renorm, "renorm")
rule(to.glu("y"), "glu")
rule(to.glu("x", before="y"), "glu_backward", linear="0")
