"""Optimizers in the plain loop on ranks beside one device: those that cannot step DTensors, and loaded states."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from error_texts import refused
from own_optimizers import ByHand, Lamb, Lion, Noisy
from torch import distributed, nn

import autopar
from autopar import Mesh

PLANS: dict[str, tuple[dict[str, int], Any]] = {
    "fsdp": ({"dp": 2}, "fsdp"),
    "tp": ({"tp": 2}, {"0.weight": ("tp", None), "0.bias": ("tp",), "2.weight": (None, "tp")}),
}


class Rows(ByHand):
    """A number for each row."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        total = state.setdefault("row", torch.full((*p.shape[:1], *[1] * (p.dim() - 1)), 1e-3, dtype=p.dtype))
        total += grad.flatten(1).square().mean(1, keepdim=True) if p.dim() > 1 else grad.square()
        p.sub_(group["lr"] * grad / total.sqrt())


class Shampoo(ByHand):
    """Gupta et al. 2018: a matrix for each dim."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        for dim, size in enumerate(p.shape):
            matrix = state.setdefault(f"of {dim}", 1e-3 * torch.eye(size, dtype=p.dtype))
            flat = grad.movedim(dim, 0).flatten(1) if p.dim() > 1 else grad[:, None]
            values, vectors = torch.linalg.eigh(matrix.add_(flat @ flat.t()))
            root = vectors @ torch.diag(values.pow(-0.5 / p.dim())) @ vectors.t()
            grad = torch.tensordot(root, grad, ([1], [dim])).movedim(0, dim)
        p.sub_(group["lr"] * grad)


class EightBits(ByHand):
    """The mean gradient in blocks of four numbers of 8 bits."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        blocks = nn.functional.pad(grad.flatten(), (0, -p.numel() % 4)).unflatten(0, (-1, 4))
        if not state:
            state.update(bits=torch.zeros(blocks.shape, dtype=torch.int8), scale=torch.zeros(len(blocks), 1))
        mean = 0.9 * state["bits"] * state["scale"].to(p.dtype) + blocks
        state["scale"] = mean.abs().amax(1, keepdim=True) / 127 + 1e-12
        state["bits"] = (mean / state["scale"]).round().to(torch.int8)
        p.sub_(group["lr"] * mean.flatten()[: p.numel()].view_as(p))


class OfAClosure(Rows):
    """It asks for the loss, counts in a group and in an attribute, and draws noise."""

    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        self.taken += 1
        for group in self.param_groups:
            group["sum"] = group.get("sum", 0.0) + float(loss)
            for p in group["params"]:
                p.add_(group["lr"] * torch.randn(p.shape, dtype=p.dtype))
        return loss


class Twice(Rows):
    def step(self, closure: Any = None) -> Any:
        closure()
        super().step()
        return closure()


class Failing(Rows):
    def step(self, closure: Any = None) -> Any:
        super().step()
        raise ValueError("no step today")


def _hf(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, **options)


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # on both plans
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rows": Rows,
    "shampoo": Shampoo,
    "8 bits": EightBits,
    "closure": OfAClosure,
}
PIECES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lion": lambda p: Lion(p, betas=(0.9, 0.99), weight_decay=0.1),
    "lamb": Lamb,
    "noisy": Noisy,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "nadam": torch.optim.NAdam,
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


class Pair:
    """A model on one device and on ranks, which train alike."""

    def __init__(self, plan: str) -> None:
        torch.manual_seed(0)
        sizes, layouts = PLANS[plan]
        self.single = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        model = copy.deepcopy(self.single)
        self.parallel = autopar.parallelize(model, Mesh(sizes), layouts, outputs="global", cache=False)

    def trained(self, make: Callable[[Any], torch.optim.Optimizer], count: int = 3) -> list[torch.optim.Optimizer]:
        optimizers = [make(model.parameters()) for model in (self.single, self.parallel)]
        self.train(optimizers, count)
        return optimizers

    def train(self, optimizers: list[torch.optim.Optimizer], count: int) -> None:
        for k in range(count):
            for model, optimizer in zip((self.single, self.parallel), optimizers, strict=True):
                seed = k + distributed.get_rank() * (model is self.parallel)  # the first rank's numbers count
                torch.manual_seed(seed)
                loss = closure_of(model, optimizer, k)
                if isinstance(optimizer, (OfAClosure, torch.optim.LBFGS)):
                    optimizer.step(loss)
                else:
                    loss()
                    optimizer.step()
        self.assert_alike()

    def assert_alike(self) -> None:
        for (name, one), other in zip(self.single.named_parameters(), self.parallel.parameters(), strict=True):
            whole: Any = other.detach()
            torch.testing.assert_close(whole.full_tensor(), one.detach(), rtol=1e-9, atol=1e-11, msg=name)


def closure_of(model: Any, optimizer: torch.optim.Optimizer, k: int) -> Callable[[], torch.Tensor]:
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return closure


def _shapes(states: Mapping[Any, Any]) -> list[tuple[bool, dict[str, Any]]]:
    """Whether states are DTensors, and their shapes."""
    return [
        (
            any(hasattr(value, "placements") for value in state.values()),
            {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)},
        )
        for state in states.values()
    ]


def stepped(plan: str) -> list[str]:
    """Returns the warnings."""
    return _stepped(plan, {**WHOLE, **PIECES})


def stepped_of_transformers() -> list[str]:
    return _stepped("fsdp", {"rows": _hf})


def _stepped(plan: str, made: Mapping[str, Callable[[Any], torch.optim.Optimizer]]) -> list[str]:
    said = []
    for name, make in made.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            single, parallel = Pair(plan).trained(make)
        texts = [f"{w.filename.rpartition('/')[2]}: {w.message}" for w in caught if "cannot step" in str(w.message)]
        assert len(texts) == (name in WHOLE and distributed.get_rank() == 0), (name, texts)
        said += texts
        ours, theirs = _shapes(parallel.state), _shapes(single.state)
        assert [shapes for _, shapes in ours] == [shapes for _, shapes in theirs], name
        if name in WHOLE:
            assert not any(is_split for is_split, _ in ours), name
        if isinstance(parallel, OfAClosure):
            assert isinstance(single, OfAClosure)
            assert parallel.taken == single.taken == 3
            assert abs(parallel.param_groups[0]["sum"] - single.param_groups[0]["sum"]) < 1e-9
    return said


def refusals() -> list[str]:
    pair = Pair("fsdp")
    before = copy.deepcopy(pair.parallel.state_dict())
    said = []
    optimizer: Rows
    for kind, error in ((Twice, RuntimeError), (Failing, ValueError)):
        optimizer = kind(pair.parallel.parameters())
        closure = closure_of(pair.parallel, optimizer, 0)
        closure()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is said of a step that fails by itself
            said.append(refused(error, lambda run=optimizer.step, own=closure: run(own)))
    for name, value in pair.parallel.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name].full_tensor())
    optimizer = Rows(pair.parallel.parameters())
    closure_of(pair.parallel, optimizer, 0)()
    if distributed.get_rank() == 0:
        said.append(refused(RuntimeError, lambda: optimizer.step()))
    else:
        said.append(refused(RuntimeError, closure_of(pair.parallel, optimizer, 0)))
    return said


LOADED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": torch.optim.NAdam,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def loaded(plan: str) -> None:
    """A state that one device has saved, before the first step and after some."""
    for name, make in LOADED.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*cannot step the pieces")
            pair = Pair(plan)
            single, parallel = pair.trained(make, 2)
            for optimizer in (parallel, make(pair.parallel.parameters())):
                optimizer.load_state_dict(copy.deepcopy(single.state_dict()))
                pair.train([single, optimizer], 2)
            if name in ("adamw", "momentum", "nadam"):
                assert all(is_split for is_split, _ in _shapes(optimizer.state)), name
