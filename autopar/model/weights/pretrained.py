"""Write a model that is on a mesh as its own ``save_pretrained`` does: the first rank gathers, and writes."""

from __future__ import annotations

import os
from typing import Any

import torch

from autopar.errors import class_of
from autopar.model.initialize import agree
from autopar.model.state_dicts import gathered
from autopar.model.weights.collective import on_all_ranks
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import Job


def save_pretrained(
    model: Any, path: str | os.PathLike[str], job: Job | None, agreement: Agreement | None, options: dict[str, Any]
) -> Any:
    """Write the folder that a single device writes. All ranks call it, and return when the folder is complete.

    The rank that writes holds all weights meanwhile, in host memory; the others hold one gathered weight at a time.

    Args:
        options: those of the model's ``save_pretrained``. ``is_main_process`` is by default true on the first rank, and
            a ``state_dict`` is gathered.

    Raises:
        TypeError: the model has no ``save_pretrained``.
        RuntimeError: another rank makes another call, or cannot write.
    """
    if not hasattr(model, "save_pretrained"):
        raise TypeError(
            f"{class_of(model)} has no save_pretrained, which models of transformers and PEFT have; save the weights "
            f"with autopar.checkpoint.save(folder, parallel.state_dict())"
        )
    agree(agreement, "save_pretrained")
    options = {"is_main_process": job is None or job.rank == 0} | options
    state = options.pop("state_dict", None)
    state = model.state_dict(keep_vars=True) if state is None else state
    weights = gathered(state, options["is_main_process"])
    if hasattr(model, "peft_config") and not weights:
        # PEFT picks its tensors by their names before it asks whether to write
        weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    with on_all_ranks(job, "save"):
        # on the other ranks too, because it writes to the model's config
        return model.save_pretrained(path, state_dict=weights, **options)
