"""Shard reductions over dims. A split dim that is summed leaves the result pending.

If the results of parts do not add up, the dim stays whole.
"""

from __future__ import annotations

from autopar.rules import forms as to
from autopar.rules.dims import along, entire
from autopar.rules.registry import rule

# the results of parts combine by the reduction itself
rule(along("open -> kept", 1, keep=2), "sum sum.dim_IntList", linear="0")
rule(along("open -> kept", 1, keep=2), "nansum count_nonzero count_nonzero.dim_IntList")
rule(along("open -> gone", 1), "autopar::sum_of_squares")
rule(along("open -> kept by max", 1, keep=2), "amax max", empty=False)
rule(along("open -> kept by min", 1, keep=2), "amin min", empty=False)
rule(along("open -> kept by max", 1, keep=2), "any any.dim any.dims")
rule(along("open -> kept by min", 1, keep=2), "all all.dim all.dims")
rule(along("open -> kept by prod", 1, keep=2), "prod prod.dim_int")

# the reduced dims stay whole
rule(along("whole -> kept", 1, keep=2), "argmax argmin logsumexp")
rule(along("whole -> kept", 2, keep=3), "linalg_vector_norm")
rule(along("whole -> kept, kept", 1, keep=2), "max.dim min.dim median.dim nanmedian.dim", empty=False)
rule(along("whole -> kept, kept", 1, default=-1, keep=2), "mode", empty=False)
rule(along("whole -> kept, kept", 2, default=-1, keep=3), "kthvalue", empty=False)
rule(along("whole -> kept, kept", "dim", keep="keepdim"), "aminmax", empty=False)
rule(entire(lambda *_: "()"), "median nanmedian", empty=False)
rule(entire(lambda *_: "()"), "trace", linear="0")
rule(to.binned, "histc")

# the op needs a whole dim, and returns all or some of it, with its indices
rule(along("whole -> part, part", 1, default=-1), "sort")
rule(along("whole -> part, part", "dim", default=-1), "sort.stable")
rule(along("whole -> part, part", 2, default=-1), "topk")
rule(along("whole -> whole, whole", 1), "cummax cummin")
