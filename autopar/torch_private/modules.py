"""Read the hooks and notes of modules."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

import torch

from autopar.torch_private.tracing import DisableTorchFunctionSubclass

IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # tried on 2.11 to 2.15: the result of load_state_dict


GLOBAL_HOOKS = tuple(
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
)  # tried on 2.11 to 2.15


# the attribute that DistributedDataParallel looks up in a module; tried on 2.11 to 2.15
ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


# the prefix of the keys that fully_shard adds to __dict__; tried on 2.11 to 2.15
NOTED_BY_COMPOSABLE = "__composable_api"


def refer_weakly(model: torch.nn.Module, whether: bool) -> None:
    """Set or drop weak references of recurrent layers to their parameters. Tried on 2.11 to 2.15.

    ``swap_tensors`` refuses them, and a forward needs them.
    """
    for layer in (module for module in model.modules() if isinstance(module, torch.nn.RNNBase)):
        layer._flat_weight_refs = (
            [None if weight is None else weakref.ref(weight) for weight in layer._flat_weights] if whether else []
        )


HOOKS_OF_GRADIENTS = "_backward_hooks", "_post_accumulate_grad_hooks"  # of leaves; tried on 2.11 to 2.15


def have_gradient_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether hooks run on the gradient of one of these leaves. Tried on 2.11 to 2.15."""
    with DisableTorchFunctionSubclass():
        return any(any(map(operator.attrgetter(hooks), tensors)) for hooks in HOOKS_OF_GRADIENTS)
