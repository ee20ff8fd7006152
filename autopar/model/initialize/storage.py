"""Give storage to a model on meta: this rank's pieces take the place of its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopar.model.dtensor_parameters import local_of
from autopar.runtime.dtensors import dtensor_of_piece, is_dtensor
from autopar.runtime.processes.job import Job


@dataclass(eq=False)
class StorageSlot:
    """One place of a model that holds a parameter or buffer; tied tensors have several places.

    Attributes:
        name: the name, as in ``named_parameters``.
        before: the tensor that the place had at first, on meta or not.
        replacement: the tensor with storage that took its place; ``before`` itself if that had storage.
    """

    owner: torch.nn.Module
    attribute: str
    name: str
    before: torch.Tensor
    replacement: torch.Tensor

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor in this place now; an initialization may have replaced it."""
        return getattr(self.owner, self.attribute)

    @property
    def was_on_meta(self) -> bool:
        return self.before.is_meta

    @property
    def what(self) -> str:
        return f"the {'parameter' if isinstance(self.before, torch.nn.Parameter) else 'buffer'} {self.name}"

    def hold(self, tensor: torch.Tensor) -> None:
        setattr(self.owner, self.attribute, tensor)  # recurrent modules also update their second list of weights here


def slots_of(model: torch.nn.Module) -> list[StorageSlot]:
    """Return all slots of a model, in the order of ``named_modules``."""
    slots = []
    for path, module in model.named_modules():
        for attribute, tensor in (*vars(module)["_parameters"].items(), *vars(module)["_buffers"].items()):
            if tensor is not None:
                slots.append(StorageSlot(module, attribute, f"{path}.{attribute}".lstrip("."), tensor, tensor))
    return slots


@contextlib.contextmanager
def materialized(model: torch.nn.Module, device: torch.device, *, tied: bool) -> Iterator[list[StorageSlot]]:
    """Give storage without values to slots on meta; they are on meta again after an exception.

    DTensors get a piece. ``tied``: tied places share one tensor; otherwise each place has its own until ``_tie``, as
    after ``torch.nn.Module.to_empty``.
    """
    slots = slots_of(model)
    made: dict[int, torch.Tensor] = {}
    try:
        for slot in slots:
            if slot.was_on_meta:
                if not tied or id(slot.before) not in made:
                    made[id(slot.before)] = _empty(slot.before, device)
                slot.replacement = made[id(slot.before)]
                slot.hold(slot.replacement)
        yield slots
    except BaseException:
        for slot in slots:
            slot.hold(slot.before)
        raise


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new: torch.Tensor = torch.empty_like(local_of(tensor), device=device)
    if is_dtensor(tensor):
        new = dtensor_of_piece(new, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    vars(new).update({key: value for key, value in vars(tensor).items() if key not in vars(new)})
    return new


def device_for(model: torch.nn.Module, job: Job | None, device: torch.device | str | None) -> torch.device:
    """Return the device for the storage: the job's, the user's, that of the model's other tensors, or the accelerator.

    Raises:
        ValueError: the user's device is not of the type of the job's mesh.
    """
    wanted = None if device is None else torch.device(device)
    if wanted is not None and wanted.type == "meta":
        raise ValueError("device='meta' has no storage; name the device of the values, such as 'cpu'")
    if job is not None:
        if wanted is not None and wanted != job.device and wanted != torch.device(job.device.type):
            raise ValueError(
                f"device={str(wanted)!r}, but the pieces of this process are on {job.device}; leave it out, or give "
                f"parallelize a DeviceMesh of that kind"
            )
        return job.device
    if wanted is not None:
        return wanted
    of_the_model = next((slot.before.device for slot in slots_of(model) if not slot.was_on_meta), None)
    return of_the_model or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
