"""Run a placed model on all simulated ranks, and compare its numbers with those of a single device."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from autopar.api import split_example
from autopar.capture.exported import is_exported
from autopar.cli.plan.planning import Planned, Planning
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.refused import Refused
from autopar.ir.structure import flatten, unflatten
from autopar.model.compared import Numbers, has_gradient, pairs_of_call, tolerance_of
from autopar.parallel import Parallel

MOST_PARAMETERS, MOST_RANKS = 20_000_000, 64  # of a model that is simulated: each rank has its pieces here


def in_float64(planning: Planning) -> Planning:
    """Return the same with a small model in float64, as it is compared: without dropout.

    Raises:
        Refused: the model or the mesh is too large to be simulated here.
    """
    parameters = sum(parameter.numel() for parameter in planning.model.parameters())
    if parameters > MOST_PARAMETERS:
        raise Refused(
            f"--run simulates all ranks in this process, and the model has {parameters:,} parameters, more than "
            f"{MOST_PARAMETERS:,}; make it smaller, as with --set num_hidden_layers=2, or leave --run out"
        )
    ranks = getattr(planning.mesh, "size", getattr(planning.mesh, "count", 0))
    if ranks > MOST_RANKS:
        raise Refused(
            f"--run simulates all ranks in this process, and {ranks} are more than {MOST_RANKS}; use a smaller --mesh, "
            f"or leave --run out"
        )
    if is_exported(planning.model):
        raise Refused(
            "--run compares a model in float64 and in evaluation, and an exported program keeps its dtypes and its "
            "mode; name a function that makes the model, or leave --run out"
        )
    leaves, structure = flatten(planning.example)
    wide = [leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return replace(planning, model=planning.model.double().eval(), example=unflatten(wide, structure))


def compared(planned: Planned, planning: Planning) -> Numbers:
    """Run the model on all simulated ranks and alone, and return the largest difference of their numbers.

    Parameters of a training step change.
    """
    eager = copy.deepcopy(planning.model)
    args, kwargs = split_example(planning.example)
    if isinstance(planned, Parallel):
        pairs = pairs_of_call(eager, planned, args, kwargs)
        return Numbers.of_pairs("outputs and gradients", pairs, tolerance_of(planned.program))
    assert planning.optimizer is not None
    optimizer = OPTIMIZERS[planning.optimizer](eager.parameters(), 1e-3, 0.0)
    expected = next(leaf for leaf in flatten(eager(*args, **kwargs))[0] if _is_loss(leaf))
    expected.backward()
    optimizer.step()
    loss = planned.simulate(*args, **kwargs)
    own = dict(planned.parallel.named_parameters())
    pairs = [("the loss", loss, expected), *((name, own[name], p) for name, p in eager.named_parameters())]
    tolerance = tolerance_of(planned.program.programs["micro"])
    return Numbers.of_pairs("the loss and the parameters after a step", pairs, tolerance)


def _is_loss(value: Any) -> bool:
    return has_gradient(value) and value.numel() == 1
