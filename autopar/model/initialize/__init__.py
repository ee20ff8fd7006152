"""Initialisation of a model that was on meta: the values of a single device, of which each rank keeps its pieces."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import distributed

from autopar.errors import shown
from autopar.model.dtensor_parameters import is_dtensor, local_of
from autopar.model.initialize.storage import StorageSlot, device_for, materialized
from autopar.model.initialize.writes import Writes
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import Job

Init = Callable[[torch.nn.Module], Any]


def initialize(
    model: torch.nn.Module,
    init: Init | None,
    device: torch.device | str | None,
    job: Job | None,
    agreement: Agreement | None,
) -> None:
    """Give storage to what is on meta, and run the initialisation on it.

    Raises:
        RuntimeError: something that was on meta has not been written; the model is on meta as before.
    """
    if init is not None and not callable(init):
        raise TypeError(f"init is a function of a module, as for torch.nn.Module.apply, not {shown(init)}")
    where = device_for(model, job, device)
    agree(agreement, "initialize")
    with materialized(model, where, tied=False) as slots:
        run_initialization(model, slots, init, where, job)


def run_initialization(model: torch.nn.Module, slots: list[StorageSlot], init: Init | None, device: torch.device,
                       job: Job | None, kept: Iterable[StorageSlot] = ()) -> None:  # fmt: skip
    """Run an initialisation, ``None`` the model's own, on materialized slots; the ``kept`` hold their values already.

    Raises:
        RuntimeError: a slot that was on meta has not been written.
    """
    have = set(kept)
    waiting = [slot for slot in slots if slot.was_on_meta and slot not in have and slot.before.numel()]
    writes = Writes([(slot.what, slot.given) for slot in waiting], [slot.given for slot in have])
    with first_ranks_generator(job, device):
        with torch.no_grad(), writes:
            _run(model, init)
        _check_draws(job, device)
    with torch.no_grad():
        for slot in slots:
            _settle(slot, writes, slot in have)
    _tie(slots, writes)
    if missed := [slot.what for slot in waiting if slot.now is slot.given and writes.time_of(slot.given) is None]:
        raise RuntimeError(
            f"{', '.join(missed)}: on meta before, and the initialisation writes nothing to "
            f"{'them' if len(missed) > 1 else 'it'}; write {'them' if len(missed) > 1 else 'it'} in init, a function "
            f"of a module, or make the model with {'these' if len(missed) > 1 else 'this one'} on a real device"
        )


def _run(model: torch.nn.Module, init: Init | None) -> None:
    if init is not None:
        model.apply(init)
    elif callable(own := getattr(model, "init_weights", None)):
        own()
    else:
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def _check_draws(job: Job | None, device: torch.device) -> None:
    """Ranks that drew other numbers hold pieces of different values; ``RuntimeError``."""
    if job is None:
        return
    state = b"".join(generator.get_rng_state().numpy().tobytes() for generator in _generators(device))
    digests: list[bytes] = [b""] * job.control.size()
    distributed.all_gather_object(digests, hashlib.sha256(state).digest(), job.control)
    if other := [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RuntimeError(
            f"the initialisation draws other random numbers on rank{'s' * (len(other) > 1)} {' '.join(other)} than on "
            f"rank 0; let init do the same on every rank"
        )


def _settle(slot: StorageSlot, writes: Writes, kept: bool) -> None:
    """What an initialisation put in the place of a tensor is laid as that was."""
    new = slot.now
    if new is slot.given or (
        new is not None and writes.time_of(new) is not None and is_dtensor(new) == is_dtensor(slot.given)
    ):
        return  # or tied to another
    if kept:
        slot.hold(slot.given)
        return
    if new is None or new.shape != slot.before.shape or new.is_meta:
        found = "nothing" if new is None else f"a tensor {list(new.shape)} on {new.device}"
        raise RuntimeError(
            f"{slot.what} is {list(slot.before.shape)}, and the initialisation puts {found} in its place; write to "
            f"it, as with .copy_()"
        )
    if is_dtensor(slot.given) and not is_dtensor(new):
        from torch.distributed.tensor import distribute_tensor

        given: Any = slot.given
        new = distribute_tensor(
            new.detach().to(local_of(given).device), given.device_mesh, given.placements, src_data_rank=None
        )
    with writes:
        slot.given.copy_(new)
    slot.hold(slot.given)


def _tie(slots: list[StorageSlot], writes: Writes) -> None:
    """Places that shared a tensor share one again: the one that was written last, unless the initialisation tied
    them."""
    shared: dict[int, list[StorageSlot]] = {}
    for slot in slots:
        if slot.was_on_meta:
            shared.setdefault(id(slot.before), []).append(slot)
    for group in shared.values():
        tensors = [slot.now for slot in group if slot.now is not None]
        latest = max(tensors, key=lambda tensor: writes.time_of(tensor) or 0)
        for slot in group:
            if slot.now is not latest:
                slot.given = latest
                slot.hold(latest)


@contextlib.contextmanager
def first_ranks_generator(job: Job | None, device: torch.device) -> Iterator[None]:
    """All ranks draw what the first rank draws. Those that had another generator have it back afterwards."""
    if job is None:
        yield
        return
    generators = _generators(device)
    own = [generator.get_rng_state() for generator in generators]
    for generator, state in zip(generators, own, strict=True):
        first = state.clone()
        distributed.broadcast(first, int(job.device_mesh.mesh.flatten()[0]), group=job.control)
        generator.set_rng_state(first)
    alike = [torch.equal(generator.get_rng_state(), state) for generator, state in zip(generators, own, strict=True)]
    try:
        yield
    finally:
        for generator, state, same in zip(generators, own, alike, strict=True):
            if not same:
                generator.set_rng_state(state)


def _generators(device: torch.device) -> list[Any]:
    """What has ``get_rng_state``: the device's, and CPU's."""
    return [torch] if device.type == "cpu" else [torch.get_device_module(device), torch]


def agree(agreement: Agreement | None, call: str) -> None:
    """All ranks make this call; ``RuntimeError``."""
    if agreement is not None:
        agreement.begin(call)
        agreement.finish()
