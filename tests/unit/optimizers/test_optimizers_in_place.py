"""Whole buckets of parameters in place, by fused kernels: what the ops say, also where memory lies otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from optimizer_steps import NAMES, OPTIMIZERS, SHAPES, Stepped, drawn
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from autopar.optimizers import IN_PLACE, count, in_place
from autopar.optimizers.ops import UPDATES
from autopar.torch_private import OpOverload

CASES = pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=NAMES)
LR = torch.tensor(0.01, dtype=torch.float64)
CLOSE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (5e-7, 5e-7),
    torch.bfloat16: (2**-7, 1e-3),
    torch.float16: (2**-10, 1e-4),
}

Laid = Callable[[torch.Tensor], torch.Tensor]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() if x.dim() == 2 else x


def sliced(x: torch.Tensor) -> torch.Tensor:
    """Every other column of something larger."""
    if not x.dim():
        return x
    around = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype)
    return around[..., ::2].copy_(x)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


class InPlace:
    """The parameters and states of a ``Stepped``, of their own, updated as one bucket."""

    def __init__(self, stepped: Stepped, lay: Sequence[Laid] = (plain,)) -> None:
        self.update = stepped.definition.update(stepped.groups[0])
        self.shared = stepped.definition.shared
        lays = [lay[k % len(lay)] for k in range(9)]
        self.params = [lays[0](param.clone()) for param in stepped.params]
        self.states = [
            [lays[k](state[name].clone()) for state in stepped.states]
            for k, name in enumerate(self.update.states, start=1)
        ]
        self.lay_gradient = lays[-1]

    def step(
        self,
        grads: Sequence[torch.Tensor],
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        for name, some in zip(self.update.states, self.states, strict=True):
            if name in self.update.counted:
                count(some, found_inf)
        assert self.update.op is not None
        grads = [self.lay_gradient(grad.clone()) for grad in grads]
        IN_PLACE[self.update.op](
            self.params,
            grads,
            self.states,
            LR,
            grad_scale,
            found_inf,
            **self.update.operands(),
            **self.update.constants,
        )


def check_alike(ours: InPlace, stepped: Stepped) -> None:
    rtol, atol = CLOSE[stepped.params[0].dtype]
    for k, (param, state) in enumerate(zip(stepped.params, stepped.states, strict=True)):
        for have, want in [
            (ours.params[k], param),
            *((some[k], state[name]) for name, some in zip(ours.update.states, ours.states, strict=True)),
        ]:
            torch.testing.assert_close(have, want, rtol=rtol, atol=atol)


def started(kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> Stepped:
    return Stepped(kind([nn.Parameter(tensor) for tensor in drawn(SHAPES, 0, dtype)], **{**options, "lr": LR.item()}))


# scale, skipped
STEPS: list[tuple[float | None, float | None]] = [
    (None, 1.0),
    (None, None),
    (8.0, None),
    (0.3, 0.0),
    (2.0, 1.0),
    (None, 0.0),
]


@CASES
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_buckets_are_the_op_for_each(kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> None:
    stepped = started(kind, options, dtype)
    ours = InPlace(stepped)
    for k, numbers in enumerate(STEPS):
        grads = drawn(SHAPES, k + 1, dtype)
        scale, found = (None if number is None else torch.tensor(number) for number in numbers)
        if dtype == torch.float64 and scale is not None:
            scale = scale.double() + 1e-9  # what float32 does not hold
        # kernels and ops round at other places: each step from the same numbers
        if dtype in (torch.bfloat16, torch.float16):
            ours = InPlace(stepped)
        stepped.step(grads, scale, found)
        ours.step(grads, scale, found)
        check_alike(ours, stepped)


@CASES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_pieces_in_half_precision(kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Of more elements than a register of the CPU holds, and some beside: all are written."""
    shapes = [(35,), (64,), (7, 19)]
    stepped = Stepped(
        kind([nn.Parameter(tensor) for tensor in drawn(shapes, 0, dtype)], **{**options, "lr": LR.item()})
    )
    for k in range(3):
        ours = InPlace(stepped)
        grads = drawn(shapes, k + 1, dtype)
        stepped.step(grads, None, None)
        ours.step(grads, None, None)
        check_alike(ours, stepped)


@CASES
def test_memory_may_lie_otherwise(kind: type[Optimizer], options: dict[str, Any]) -> None:
    """Kernels take memory as it lies; what is around a piece stays as it was."""
    for lay in (
        (transposed,),
        (plain, transposed),
        (transposed, plain),
        (sliced,),
        (plain, sliced),
        (plain, plain, sliced),
    ):
        stepped = started(kind, options, torch.float64)
        ours = InPlace(stepped, lay)
        tensors = [tensor for some in (ours.params, *ours.states) for tensor in some]
        places = [(tensor.stride(), tensor.data_ptr()) for tensor in tensors]
        for k in range(3):
            stepped.step(drawn(SHAPES, k + 1))
            ours.step(drawn(SHAPES, k + 1))
        check_alike(ours, stepped)
        assert [(tensor.stride(), tensor.data_ptr()) for tensor in tensors] == places
        for tensor in tensors:
            if tensor.dim() and not tensor.is_contiguous() and tensor.stride(-1) == 2:
                around = tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)
                assert bool((around == 7).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_another_dtype(dtype: torch.dtype) -> None:
    """As large as float16 does not hold, before they are divided; as small, afterwards."""
    stepped = started(AdamW, {}, dtype)
    for k, gradients in enumerate((torch.bfloat16, torch.float32, torch.float64)):
        scale = torch.tensor(2.0**20, dtype=gradients if gradients == torch.float64 else torch.float32)
        for size in (2.0**20, 2.0**-10):
            ours = InPlace(stepped)
            grads = [size * grad for grad in drawn(SHAPES, k, gradients)]
            stepped.step(grads, scale)
            ours.step(grads, scale)
            check_alike(ours, stepped)
            assert all(bool(param.isfinite().all()) for param in stepped.params)


def test_a_count_may_be_shared() -> None:
    stepped = started(AdamW, {}, torch.float64)
    ours = InPlace(stepped)
    stepped.step(drawn(SHAPES, 1))
    ours.states[-1] = [torch.ones(())] * len(SHAPES)
    IN_PLACE[UPDATES["adamw"]](
        ours.params, drawn(SHAPES, 1), ours.states, LR, None, None, **ours.update.operands(), **ours.update.constants
    )
    check_alike(ours, stepped)


@pytest.mark.parametrize(("options", "lay"),
                         [({"momentum": 0.9}, plain), ({"momentum": 0.9}, transposed),
                          ({"momentum": 0.9, "dampening": 0.1}, plain)],
                         ids=["kernel", "copies", "one by one"])  # fmt: skip
def test_parameters_that_want_gradients(options: dict[str, float], lay: Laid) -> None:
    stepped = started(SGD, options, torch.float64)
    ours = InPlace(stepped, (lay, plain))
    ours.params = [param.requires_grad_() for param in ours.params]
    stepped.step(drawn(SHAPES, 1))
    ours.step(drawn(SHAPES, 1))
    assert all(param.is_leaf for param in ours.params)
    ours.params = [param.detach() for param in ours.params]
    check_alike(ours, stepped)


@pytest.mark.parametrize("name", UPDATES)
def test_nothing_to_do(name: str) -> None:
    """An empty bucket is no error."""
    count([], None)
    IN_PLACE[UPDATES[name]]([], [], [], LR, None, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """How often each of the rows of ``FUSED`` is used."""
    seen: list[Any] = []

    def noted(kernel: OpOverload) -> Any:
        class Kernel:
            def __call__(self, *args: Any, **kwargs: Any) -> None:
                seen.append(kernel)
                kernel(*args, **kwargs)

            name = kernel.name

        return Kernel()

    monkeypatch.setattr(
        in_place, "FUSED", {name: (noted(kernel), *rest) for name, (kernel, *rest) in in_place.FUSED.items()}
    )
    yield seen


@CASES
def test_a_bucket_is_one_kernel(kind: type[Optimizer], options: dict[str, Any], calls: list[Any]) -> None:
    """But where gradients are dampened."""
    stepped = started(kind, options, torch.float32)
    InPlace(stepped).step(drawn(SHAPES, 1, torch.float32), torch.tensor(2.0), torch.tensor(0.0))
    assert len(calls) == (not options.get("dampening"))


def test_without_a_kernel_the_op_is_called_for_each(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    monkeypatch.setattr(in_place, "has_kernel", lambda op, device: False)
    stepped = started(SGD, {"momentum": 0.9}, torch.float64)
    ours = InPlace(copy.deepcopy(stepped))
    stepped.step(drawn(SHAPES, 1))
    ours.step(drawn(SHAPES, 1))
    check_alike(ours, stepped)
    assert not calls
