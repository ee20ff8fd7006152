"""Load Inductor, and ask torch's partitioner and profiler."""

from __future__ import annotations

import functools
import importlib
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

set_onednn = (
    torch._C._set_mkldnn_enabled
)  # tried on 2.11 to 2.15: turns oneDNN's ops on or off; the public flag may be locked in the process

set_cudnn = torch._C._set_cudnn_enabled  # tried on 2.11 to 2.15: the same of cuDNN's


DYNAMO = "torch._dynamo"  # tried on 2.11 to 2.15: the module that torch.compile imports


INDUCTOR = "torch._inductor.compile_fx"  # tried on 2.11 to 2.15: the module that Inductor is in


# tried on 2.11 to 2.15: whether a profiler of torch records this process, in any thread; no public name tells. It calls
# no function of Python, because each run of a function asks
profiler_is_on: Callable[[], bool] = functools.partial(
    operator.attrgetter("_is_profiler_enabled"), torch.autograd.profiler
)


def import_inductor() -> None:
    """Import Inductor without its warnings: it uses parts of torch that are deprecated. Tried on 2.11 to 2.15."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module(INDUCTOR)


def saved_by_min_cut(joint: fx.GraphModule, outputs: int) -> frozenset[str]:
    """Return the names of the values that torch's min-cut partitioner keeps for the backward. Tried on 2.11 to 2.15.

    Args:
        joint: forward and backward, with placeholders ``primals_…`` and ``tangents_…``; ``meta`` has fake tensors
            (``val``) and, for ops of the backward, the ``partitioner_tag``. The graph is changed.
        outputs: how many of its results are those of the forward; these come first.
    """
    from torch._functorch import config, partitioners  # imported late, because they load half of Inductor

    with config.patch(cse=False):  # equal values keep their names
        forward, _ = partitioners.min_cut_rematerialization_partition(joint, None, num_fwd_outputs=outputs)
    flat: Any
    (flat,) = forward.graph.output_node().args
    return frozenset(value.name for value in flat[outputs:])
