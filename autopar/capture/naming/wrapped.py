"""Leave the modules that wrap a layer out of a tensor's name.

    model.layers.0.q_proj.base_layer.weight          model.layers.0.q_proj.weight        an adapter of PEFT
    layers.0._orig_mod.up.weight                     layers.0.up.weight                  torch.compile
    lm_head.modules_to_save.default.weight           lm_head.weight                      a copy that PEFT trains

A path is a list of steps from the root, each with its module. Steps into wrappers are left out; the step before takes
the wrapped module in the place of the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.utils.parametrize import is_parametrized

# children with such names
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "token_adapter")
# children whose result the wrapper returns unchanged
CALLED_ALIKE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

WRAPPING = {  # class → the child that it wraps; in other classes this name may be an ordinary child
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "AveragedModel": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "AuxiliaryTrainingWrapper": "original_module",
}
# a class, and its child whose children are each a copy of the wrapped module
COPIES = ("AuxiliaryTrainingWrapper", "modules_to_save")

Step = tuple[str, torch.nn.Module | None]  # a name, and the module that is called so; ``None`` for a tensor


def class_names(module: torch.nn.Module | None) -> set[str]:
    """Return the names of a module's class and of those it derives from."""
    return {base.__name__ for base in type(module).__mro__}


def class_name(module: torch.nn.Module) -> str:
    """Return the name of a module's class.

    A parametrized module has a generated class, so the class that it derives from is named.
    """
    kind = type(module)
    return (kind.__bases__[0] if is_parametrized(module) else kind).__name__


def steps_to(name: str, modules: Mapping[str, torch.nn.Module]) -> list[Step]:
    """Return the steps of a name; ``modules`` has all modules by their paths."""
    parts = name.split(".")
    return [(part, modules.get(".".join(parts[: k + 1]))) for k, part in enumerate(parts)]


def through(root: torch.nn.Module, steps: Sequence[Step], *, calls: bool = False) -> list[Step]:
    """Return the steps without those into wrappers.

    With ``calls``, only wrappers that return their child's result are left out.
    """
    without_wrappers: list[Step] = []
    parent: torch.nn.Module | None = root
    copies = False  # whether the last step was into the dict of a layer's copies
    for name, module in steps:
        kinds = class_names(parent)
        into_copies = not calls and name == COPIES[1] and COPIES[0] in kinds
        if copies or into_copies or _is_wrapped(name, module, kinds, CALLED_ALIKE if calls else WRAPPERS):
            if without_wrappers and not into_copies:
                without_wrappers[-1] = without_wrappers[-1][0], module
        else:
            without_wrappers.append((name, module))
        copies, parent = into_copies, module
    return without_wrappers


def _is_wrapped(name: str, module: torch.nn.Module | None, parents: set[str], children: Sequence[str]) -> bool:
    return module is not None and (name in children or any(WRAPPING.get(kind) == name for kind in parents))


def joined(steps: Sequence[Step], spelled: Callable[[str, torch.nn.Module], str] = lambda name, module: name) -> str:
    return ".".join(name if module is None else spelled(name, module) for name, module in steps)


def with_class(name: str, module: torch.nn.Module) -> str:
    """``c_fc:Conv1D``."""
    return f"{name}:{class_name(module)}"
