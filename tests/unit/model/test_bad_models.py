"""Models that no step can hold: one clear error each, which names the offender and the remedy, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from models import Block
from refusals import refuses, x
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

import autopar
from autopar import CaptureError, Mesh, PlanError

HERE = re.escape("test_bad_models.py")


def forwards(function: Any, **attributes: Any) -> nn.Module:
    """A model with a layer ``w``, attributes, and ``function(self, x)`` for its forward."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8)
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self, x)

    return Given()


def _keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = self.w(x)
    return self.last


def _logs(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.log.append(x.detach())
    return self.w(x)


def _caches(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.mask is None:
        self.mask = torch.arange(8.0)
    return self.w(x) * self.mask


def _writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.c.add_(1)
    return self.w(x) * self.c


def _scales(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.w(x) * self.t


HELD = {
    "an attribute": (
        _keeps,
        {},
        r"forward keeps a tensor in last, which a captured step cannot do\n  return it, or .*",
    ),
    "a list": (_logs, {"log": []}, r"forward keeps a tensor in log, .*\n.*"),
    "a cache": (_caches, {"mask": None}, r"forward keeps a tensor in mask, .*\n.*"),
    "a write": (
        _writes,
        {"c": torch.zeros(1)},
        rf"forward writes into a tensor that is neither a parameter, nor a buffer, nor an argument, nor made in it\n"
        rf"    {HERE}:\d+  self\.c\.add_\(1\)   in module the root\n  make it a buffer of the module, with "
        rf"register_buffer",
    ),
    "an unregistered parameter": (
        _scales,
        {"t": torch.ones(8, requires_grad=True)},
        rf"forward reads a tensor that requires gradients and is neither a parameter nor an argument\n"
        rf"    {HERE}:\d+  return self\.w\(x\) \* self\.t   in module the root\n"
        rf"  register it \(torch\.nn\.Parameter, ParameterList\), pass it in, or detach\(\) it",
    ),
}


@pytest.mark.parametrize("case", HELD)
def test_tensors_that_a_step_cannot_hold(case: str) -> None:
    """Refused, and the model holds exactly what it held: no stand-ins, nothing written."""
    function, attributes, text = HELD[case]
    model = forwards(function, **attributes)
    before = {key: value for key, value in vars(model).items()}
    kept = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in attributes.items()}
    refuses(CaptureError, text, model)
    after = vars(model)
    assert before.keys() == after.keys() and all(before[key] is after[key] for key in before)
    for key, value in kept.items():
        same = (
            torch.equal(value, getattr(model, key)) if isinstance(value, torch.Tensor) else value == getattr(model, key)
        )
        assert same


def test_a_parameter_that_is_written() -> None:
    def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.weight.mul_(2)
        return self.w(x)

    refuses(
        CaptureError,
        rf"the step writes into the parameter w\.weight, which the caller would see changed\n"
        rf"    {HERE}:\d+  self\.w\.weight\.mul_\(2\)   in module the root\n"
        rf"  write it outside of the step, as an optimizer does",
        forwards(writes),
    )


HOOKED = {
    "weight_norm": (torch.nn.utils.weight_norm, "up.weight",
                    r"use torch\.nn\.utils\.parametrizations\.weight_norm, which computes the same"),
    "spectral_norm": (torch.nn.utils.spectral_norm, "up.weight",
                      r"use torch\.nn\.utils\.parametrizations\.spectral_norm, which computes the same"),
    "prune": (lambda layer: prune.l1_unstructured(layer, "bias", 0.5), "up.bias",
              r"end it with torch\.nn\.utils\.prune\.remove\(module, 'bias'\), or multiply by the mask in a "
              r"parametrization"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_hooks_that_compute_weights(name: str) -> None:
    register, tensor, remedy = HOOKED[name]
    model = Block()
    register(model.up)
    refuses(
        CaptureError,
        rf"a hook of torch\.nn\.utils\.{name} puts a computed tensor into {re.escape(tensor)} before each forward, "
        rf"which a captured step cannot do\n"
        rf"    models\.py:\d+  return self\.down\(self\.act\(self\.up\(x\)\)\)\n"
        rf"  {remedy}",
        model,
    )


def test_buffers_that_share_memory() -> None:
    def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.a.add_(1)
        return self.w(x) * self.b.sum()

    model = forwards(writes)
    model.register_buffer("a", torch.zeros(4))
    model.register_buffer("b", model.a[:2])
    refuses(
        CaptureError,
        r"the step writes the buffer a, which shares its memory with another parameter or buffer\n"
        r"  give each its own memory, with clone\(\)",
        model,
    )


WRAPPED = {
    "data parallel": (
        lambda m: nn.DataParallel(m),
        r"parallelize takes the model itself, not DataParallel; pass the module that it wraps, model\.module",
    ),
    "data parallel inside": (
        lambda m: nn.Sequential(nn.DataParallel(m)),
        r"parallelize takes the model itself, not DataParallel \(model\.0\); pass the module that it wraps, "
        r"model\.0\.module",
    ),
    "scripted": (
        lambda m: torch.jit.trace(m, x, check_trace=False),
        r"parallelize takes an eager model, not one of torch\.jit; .*",
    ),
    "compiled": (
        lambda m: torch.compile(m),
        r"parallelize takes the model before torch\.compile; pass model\._orig_mod",
    ),
    "lazy": (
        lambda m: nn.LazyLinear(3),
        r"the parameter weight has no shape yet; run the model once before parallelize",
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.filterwarnings("ignore")
def test_models_that_are_not_plain(case: str) -> None:
    wrap, text = WRAPPED[case]
    with pytest.raises(TypeError) as caught:
        autopar.parallelize(wrap(Block()), Mesh(dp=2), "ddp", example=(x,))
    assert re.fullmatch(text, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, {"dp": 2, "pp": 2, "tp": 2}, {"pp": 4}], ids=str)
def test_pp_is_no_axis_of_a_layout(sizes: dict[str, int]) -> None:
    """The stages of a pipeline lie along it; a mesh of one stage is as one without."""
    text = (
        r"the plan's 'up.weight': \('pp', None\) is split over pp, which is no axis of layouts: the stages of a "
        r"pipeline lie along it, each with other parameters; leave it out, and cut the model with "
        r"train_step\(schedule=, stages=\)"
    )
    refuses(PlanError, text, Block(), mesh=Mesh(sizes), plan={"up.weight": ("pp", None)})
    assert autopar.parallelize(Block(), Mesh(pp=1, dp=2), "ddp", example=(x,)).mesh.size == 2


def test_a_stage_is_not_the_mesh() -> None:
    with pytest.raises(ValueError, match=r"parallelize takes the whole mesh; this one is the stage 's0'"):
        autopar.parallelize(Block(), Mesh(dp=2, name="s0"), example=(x,))


def test_tensors_that_are_not_dense() -> None:
    refuses(
        CaptureError,
        r"argument x is a sparse_coo tensor, which has no pieces\n  make it dense: to_dense\(\), or sparse=False in "
        r"an embedding",
        Block(),
        example=(x.to_sparse(),),
    )


def test_simulating_without_data() -> None:
    with torch.device("meta"):
        model, on_meta = Block(), torch.randn(4, 8)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(on_meta,))
    with pytest.raises(ValueError, match=r"up\.weight is on the meta device and has no values"):
        parallel.simulate(on_meta)


def test_state_in_nested_containers() -> None:
    def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.cache["k"].append(x)
        return self.w(sum(self.cache["k"]))

    model = forwards(keeps, cache={"k": []})
    refuses(CaptureError, r"forward keeps a tensor in cache, which a captured step cannot do\n.*", model)
    assert model.cache == {"k": []}


def test_writes_into_tensors_of_other_objects() -> None:
    """Refused before they happen."""
    holder = [[torch.zeros(4, 8)]]

    def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
        holder[0][0].add_(1)
        return self.w(x + holder[0][0])

    refuses(
        CaptureError,
        rf"forward writes into a tensor that is neither .*\n    {HERE}:\d+  holder\[0\]\[0\]\.add_\(1\) .*\n.*",
        forwards(writes),
    )
    assert not holder[0][0].any()


def test_a_shared_buffer_that_one_owner_replaces() -> None:
    def replaces(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.one.b = self.one.b + 1
        return self.w(x) * self.one.b.sum() + self.two.b.sum()

    shared = torch.zeros(4)
    model = forwards(replaces, one=nn.Module(), two=nn.Module())
    model.one.register_buffer("b", shared)
    model.two.register_buffer("b", shared)
    refuses(
        CaptureError,
        r"forward gives the buffer one\.b a new tensor, and others share the old one\n"
        r"  write into it \(copy_\), so that all see it, or give each its own",
        model,
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on the way to jvp
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch.func.jvp, torch 2.15
def test_transforms_are_refused() -> None:
    model = Block().requires_grad_(False)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
    with pytest.raises(ValueError, match=r"torch\.func transforms a call of a model on a mesh"):
        torch.func.jvp(parallel.simulate, (x,), (x,))
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"is inside a torch\.func transform or carries a forward-mode tangent"),
    ):
        parallel.simulate(forward_ad.make_dual(x, x))
