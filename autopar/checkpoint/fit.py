"""Check whether a checkpoint has a state's tensors with their shapes and dtypes, and explain it if not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

import torch

from autopar.checkpoint.manifest import Manifest, described
from autopar.checkpoint.values import Tree, leaves, names
from autopar.errors import CheckpointError

SHOWN = 5  # lines of each kind
# an optimizer's state of a parameter: a training that goes on without it goes wrong
OPTIMIZER = re.compile(r"(^|/)optimizer/state/")


def check_fit(
    checkpoint: str, manifest: Manifest, tensors: Mapping[str, torch.Tensor], tree: Tree, strict: bool
) -> None:
    """Compare a checkpoint with a state.

    Args:
        checkpoint: the name of the checkpoint in errors.
        tensors, tree: the state, as ``values.encode_state`` returns it.
        strict: whether an entry that only one of them has is an error.

    Raises:
        CheckpointError: they do not fit; names the tensors, and for a name that only one of them has the nearest name
            of the other.
    """
    stored = manifest.tensors
    both = [name for name in tensors if name in stored]
    lost: list[str] = []
    lines = _listed(
        f"{name} is {stored[name]} in the checkpoint, and "
        f"{described(tensors[name].dtype, tuple(tensors[name].shape))} in the state"
        for name in both
        if (stored[name].dtype, stored[name].shape) != (tensors[name].dtype, tuple(tensors[name].shape))
    )
    if strict:
        state_names, checkpoint_names = set(names(tree)), set(names(manifest.tree))
        missing = [name for name in tensors if name not in stored]
        unexpected = [name for name in stored if name not in tensors]
        lost = [name for name in unexpected if OPTIMIZER.search(name)]
        lines += _listed(
            _only_in("the state", "the checkpoint", name, name in checkpoint_names, unexpected) for name in missing
        )
        lines += _listed(
            _only_in("the checkpoint", "the state", name, name in state_names, missing) for name in unexpected
        )
        lines += _listed(
            f"{name} is in the state, and not in the checkpoint"
            for name, _ in leaves(tree)
            if name not in checkpoint_names
        )
    if not lines:
        return
    other = ""
    if 2 * len(both) < max(len(tensors), len(stored)):
        other = (
            f"; only {len(both)} of {len(stored)} tensors have a name that the state has, so the checkpoint may "
            f"be of another model"
        )
    listed = "".join(f"\n    {line}" for line in lines)
    remedy = "pass a state of the same keys and shapes" + (
        ", or strict=False to load what both have" if strict and not lost else ""
    )
    if lost and not any(map(OPTIMIZER.search, tensors)):
        remedy = (
            f"an optimizer has no state before its first step: call step.capture(batch), which gives it one, and "
            f"then step.state_dict(); {remedy}"
        )
    raise CheckpointError(f"{checkpoint} does not fit the state{other}{listed}\n  {remedy}")


def _only_in(owner: str, other: str, name: str, is_plain: bool, candidates: list[str]) -> str:
    if is_plain:
        return f"{name} is a tensor in {owner}, and none in {other}"
    near = difflib.get_close_matches(name, candidates, 1)
    return f"{name} is in {owner}, and not in {other}" + (f", which has {near[0]}" if near else "")


def _listed(lines: Iterable[str]) -> list[str]:
    every = list(lines)
    return every if len(every) <= SHOWN else [*every[:SHOWN], f"and {len(every) - SHOWN} more"]
