"""Ask eager whether an op takes tensors of these dtypes, where the kernels of fake tensors do not ask.

Fake tensors multiply a matrix of int64 with one of float32, and eager refuses that. Before such an op is captured, it
runs once on the smallest real tensors of the same dtypes, so its error is eager's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.torch_private import without_function_modes, without_modes

Shape = tuple[int, ...]

# op → its arguments in the smallest call: a tuple is the shape of a tensor, which has the operand's dtype; "index" is a
# tensor with one position; all else is given as it is
SMALLEST: Mapping[str, tuple[Any, ...]] = {
    "aten.mm.default": ((1, 1), (1, 1)),
    "aten.bmm.default": ((1, 1, 1), (1, 1, 1)),
    "aten.addmm.default": ((1,), (1, 1), (1, 1)),
    "aten.baddbmm.default": ((1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "aten.linear.default": ((1, 1), (1, 1), (1,)),
    "aten.mv.default": ((1, 1), (1,)),
    "aten.addmv.default": ((1,), (1, 1), (1,)),
    "aten.dot.default": ((1,), (1,)),
    "aten.convolution.default": ((1, 1, 1, 1), (1, 1, 1, 1), (1,), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "aten._cdist_forward.default": ((1, 1), (1, 1), 2.0, None),
    "aten.grid_sampler_2d.default": ((1, 1, 1, 1), (1, 1, 1, 2), 0, 0, False),
    "aten.native_layer_norm.default": ((1, 1), [1], (1,), (1,), 1e-5),
    "aten.native_group_norm.default": ((1, 1, 1), (1,), (1,), 1, 1, 1, 1, 1e-5),
    "aten.native_batch_norm.default": ((2, 1), (1,), (1,), (1,), (1,), True, 0.1, 1e-5),
    "aten.binary_cross_entropy.default": ((1,), (1,)),
    "aten.binary_cross_entropy_with_logits.default": ((1,), (1,), None, None, 1),
    "aten.nll_loss_forward.default": ((1, 1), (1,), (1,), 1, -100),
    "aten.index_add.default": ((1,), 0, "index", (1,)),
    "aten.index_copy.default": ((1,), 0, "index", (1,)),
    "aten.index_put.default": ((1,), ["index"], (1,)),
    "aten._softmax.default": ((1,), 0, False),
    "aten._log_softmax.default": ((1,), 0, False),
    "aten.gelu.default": ((1,),),
    "aten.silu.default": ((1,),),
    "aten.glu.default": ((2,),),
    "aten.log_sigmoid_forward.default": ((1,),),
}


def check_dtypes(op: Any, args: Sequence[Any]) -> None:
    """Raise eager's own error if an op of the table has no kernel for the dtypes of its operands.

    The kernels that run are those of the CPU. Others may lack other dtypes, but they refuse the same mixtures.
    """
    call = SMALLEST.get(str(op))
    if call is None:
        return
    operands = [x if isinstance(x, torch.Tensor) else None for x in args[: len(call)]]
    dtypes = tuple(None if x is None else x.dtype for x in operands)
    on_cpu = all(x is None or x.device.type == "cpu" for x in operands)
    if on_cpu or len({dtype for dtype in dtypes if dtype is not None}) > 1:
        _try(op, dtypes)


@functools.lru_cache(maxsize=1024)
def _try(op: Any, dtypes: tuple[torch.dtype | None, ...]) -> None:
    """Run the smallest call with operands of these dtypes; ``None``, and a position that is not there, are no tensors.

    What is raised is not cached.
    """

    def operand(position: int, like: Any) -> Any:
        if isinstance(like, tuple):
            dtype = dtypes[position] if position < len(dtypes) else None
            return None if dtype is None else torch.zeros(like, dtype=dtype, device="cpu")
        return index if like == "index" else [index] if like == ["index"] else like

    with without_modes(), without_function_modes(), torch.no_grad():
        index = torch.zeros(1, dtype=torch.int64, device="cpu")
        op(*(operand(k, like) for k, like in enumerate(SMALLEST[str(op)])))
