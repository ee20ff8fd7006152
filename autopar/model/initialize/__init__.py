"""Initialize a model on meta: give it storage, and a single device's values, of which each rank keeps its pieces."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from autopar.errors import shown
from autopar.model.dtensor_parameters import local_of
from autopar.model.initialize.writes import Writes
from autopar.runtime.dtensors import dtensor_of_piece, is_dtensor
from autopar.runtime.processes.job import Job
from autopar.runtime.seeds import first_ranks_generator, generators_of

Init = Callable[[torch.nn.Module], Any]


def initialize(model: torch.nn.Module, init: Init | None, device: torch.device | str | None, job: Job | None) -> None:
    """Give storage to parameters and buffers on meta, and run the initialization on them.

    Raises:
        RuntimeError: the initialization did not write a tensor that was on meta. The model is on meta as before.
    """
    if init is not None and not callable(init):
        raise TypeError(f"init is a function of a module, as for torch.nn.Module.apply, not {shown(init)}")
    where = device_for(model, job, device)
    with materialized(model, where, tied=False) as slots:
        run_initialization(model, slots, init, where, job)


def run_initialization(model: torch.nn.Module, slots: list[StorageSlot], init: Init | None, device: torch.device,
                       job: Job | None, kept: Iterable[StorageSlot] = ()) -> None:  # fmt: skip
    """Run an initialization on slots with storage; ``None`` is the model's own. ``kept`` have their values already.

    Raises:
        RuntimeError: the initialization did not write to a slot that was on meta.
    """
    with_values = set(kept)
    without_values = [slot for slot in slots if slot.was_on_meta and slot not in with_values and slot.before.numel()]
    writes = Writes(
        [(slot.what, slot.replacement) for slot in without_values], [slot.replacement for slot in with_values]
    )
    with first_ranks_generator(job, device):
        with torch.no_grad(), writes:
            _run(model, init)
        _check_draws(job, device)
    with torch.no_grad():
        for slot in slots:
            _settle_slot(slot, writes, slot in with_values)
    _tie(slots, writes)
    if unwritten := [
        slot.what
        for slot in without_values
        if slot.now is slot.replacement and writes.time_of(slot.replacement) is None
    ]:
        raise RuntimeError(
            f"{', '.join(unwritten)}: on meta before, and the initialisation writes nothing to "
            f"{'them' if len(unwritten) > 1 else 'it'}; write {'them' if len(unwritten) > 1 else 'it'} in init, a "
            f"function of a module, or make the model with {'these' if len(unwritten) > 1 else 'this one'} on a real "
            f"device"
        )


def _run(model: torch.nn.Module, init: Init | None) -> None:
    if init is not None:
        model.apply(init)
    elif callable(init_weights := getattr(model, "init_weights", None)):
        init_weights()
    else:
        for module in model.modules():
            if callable(reset_parameters := getattr(module, "reset_parameters", None)):
                reset_parameters()


def _check_draws(job: Job | None, device: torch.device) -> None:
    """Raise ``RuntimeError`` if ranks drew different random numbers: their pieces would belong to different values."""
    if job is None:
        return
    state = b"".join(generator.get_state().numpy().tobytes() for generator in generators_of(device))
    digests: list[bytes] = [b""] * job.control.size()
    distributed.all_gather_object(digests, hashlib.sha256(state).digest(), job.control)
    if differing := [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RuntimeError(
            f"the initialisation draws other random numbers on rank{'s' * (len(differing) > 1)} {' '.join(differing)} "
            f"than on rank 0; let init do the same on every rank"
        )


def _settle_slot(slot: StorageSlot, writes: Writes, kept: bool) -> None:
    """Shard the tensor that an initialization put into a slot like the tensor that was there before."""
    new = slot.now
    if new is slot.replacement or (
        new is not None and writes.time_of(new) is not None and is_dtensor(new) == is_dtensor(slot.replacement)
    ):
        return  # written in place, or tied to another tensor
    if kept:
        slot.hold(slot.replacement)
        return
    if new is None or new.shape != slot.before.shape or new.is_meta:
        description = "nothing" if new is None else f"a tensor {list(new.shape)} on {new.device}"
        raise RuntimeError(
            f"{slot.what} is {list(slot.before.shape)}, and the initialisation puts {description} in its place; write "
            f"to it, as with .copy_()"
        )
    with writes:  # of a whole tensor, a DTensor takes its piece
        slot.replacement.copy_(new)
    slot.hold(slot.replacement)


def _tie(slots: list[StorageSlot], writes: Writes) -> None:
    """Tie slots again that shared a tensor, to the one that was written last, unless the initialization tied them."""
    shared: dict[int, list[StorageSlot]] = {}
    for slot in slots:
        if slot.was_on_meta:
            shared.setdefault(id(slot.before), []).append(slot)
    for group in shared.values():
        tensors = [slot.now for slot in group if slot.now is not None]
        latest = max(tensors, key=lambda tensor: writes.time_of(tensor) or 0)
        for slot in group:
            if slot.now is not latest:
                slot.replacement = latest
                slot.hold(latest)


# -- storage -----------------------------------------------------------------------------------------------------------
#
# Give storage to a model on meta: this rank's pieces take the place of its tensors.


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
