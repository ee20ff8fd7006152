"""What a user reads from the DTensors of a model on a mesh, and writes to them, in a plain loop beside one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from error_texts import refused
from models import COLUMN_ROW, Block
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import autopar
from autopar.runtime.processes.agreement import Agreement

PAIR = {name.removeprefix("*."): layout for name, layout in COLUMN_ROW.items()}
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda g: g.norm().item(),
    "norm of another order": lambda g: g.norm(1).item(),
    "float": lambda g: float(g.sum()),
    "largest": lambda g: float(g.max()),
    "int": lambda g: int((g > 0).sum()),
    "bool": lambda g: bool((g > g.max() - 1e-3).any()),
    "f-string": lambda g: f"{g.square().mean():.4f} {g.norm()}"[:12] + f"{g}"[:0],
    "tolist": lambda g: g.tolist(),
    "numpy": lambda g: g.sum(-1).numpy().round(9).tolist(),
    "an element": lambda g: g.flatten()[-1].item(),
}


class Scored(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def _pair(mesh: autopar.Mesh, plan: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Scored(Block()).double()
    kept = copy.deepcopy(model)
    if isinstance(plan, dict):
        plan = {f"0.{name}": layout for name, layout in plan.items()}
    return kept, autopar.parallelize(model, mesh, plan)


def _x() -> torch.Tensor:
    return torch.linspace(-1, 2, 32, dtype=torch.float64).reshape(4, 8)


def read(sizes: dict[str, int], plan: Any) -> None:
    single, parallel = _pair(autopar.Mesh(sizes), plan)
    for model in (single, parallel):
        model(_x()).backward()
    for name, parameter in parallel.named_parameters():
        for what, reading in READS.items():
            one, here = reading(single.get_parameter(name).grad), reading(parameter.grad)
            if isinstance(one, (float, list)):
                one, here = torch.tensor(one), torch.tensor(here)
                torch.testing.assert_close(here, one, msg=lambda said, at=(name, what): f"{at}: {said}")
            else:
                assert here == one, (name, what, one, here)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (single, parallel)]
    assert f"{norms[0]:.6f}" == f"{norms[1]:.6f}"
    with torch.no_grad():  # a NaN in the piece of one rank
        parallel.get_parameter("0.up.weight").grad.copy_(
            distribute_tensor(
                torch.full((12, 8), 1.0, dtype=torch.float64).index_fill(0, torch.tensor([11]), torch.nan),
                *(getattr(parallel.get_parameter("0.up.weight"), of) for of in ("device_mesh", "placements")),
            )
        )
    assert bool(parallel.get_parameter("0.up.weight").grad.isnan().any())


def read_on_one_rank() -> str:
    _, parallel = _pair(autopar.Mesh(dp=2), "fsdp")
    parallel(_x()).backward()
    norm = parallel.get_parameter("0.up.weight").grad.norm()
    if distributed.get_rank() == 0:
        said = refused(RuntimeError, lambda: norm.item())
    else:
        said = refused(RuntimeError, lambda: parallel(_x()))
    parallel(_x())  # all ranks go on
    return said


DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": nn.init.normal_,
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=0.1),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "orthogonal_": lambda p: nn.init.orthogonal_(p) if p.shape[0] > p.shape[1] else p,
    "eye_": nn.init.eye_,
    "exponential_": lambda p: p.exponential_(2.0),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "random_": lambda p: p.random_(5),
    "noise": lambda p: p.add_(torch.randn_like(p), alpha=0.1),
    "mask": lambda p: p.mul_(torch.bernoulli(torch.ones_like(p) * 0.5)),
    "dropout": lambda p: p.copy_(nn.functional.dropout(p, 0.5)),
    "data": lambda p: p.data.normal_(),
    "a generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(int(p[0, 0] * 0) + 3)),
}


@torch.no_grad()
def drawn(sizes: dict[str, int], plan: Any) -> str:
    """Ranks have other seeds; the numbers are those of one device with the first rank's. Returns what is refused."""
    single, parallel = _pair(autopar.Mesh(sizes), plan)
    for what, draw in DRAWS.items():
        for name in ("0.up.weight", "0.down.weight"):
            torch.manual_seed(7)
            draw(single.get_parameter(name))
            torch.manual_seed(7 + distributed.get_rank())
            draw(parallel.get_parameter(name))
            here = parallel.get_parameter(name).full_tensor()
            assert torch.equal(here, single.get_parameter(name)), (what, name)
    wide = parallel.get_parameter("0.down.weight")
    said = refused(NotImplementedError, lambda: nn.init.orthogonal_(wide))
    for model in (single, parallel):
        torch.manual_seed(7 if model is single else 7 + distributed.get_rank())
        model.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)
    for name, parameter in parallel.named_parameters():
        assert torch.equal(parameter.full_tensor(), single.get_parameter(name)), name
    torch.testing.assert_close(parallel(_x()), single(_x()))
    return said


def written(plan: str) -> list[str]:
    """What is said of writes that differ, each mended afterwards; what is equal passes."""
    _, parallel = _pair(autopar.Mesh(dp=2), plan)
    rank, said = distributed.get_rank(), list[str]()
    bias, weight = parallel.get_parameter("0.up.bias"), parallel.get_parameter("0.down.weight")

    def again() -> Any:
        return parallel(_x())

    with torch.no_grad():
        bias.mul_(2)
        again()
        bias.fill_(rank)
        said.append(refused(RuntimeError, again))
        said.append(refused(RuntimeError, again))  # it stays so
        bias.fill_(1)
        again()
        if rank == 0:
            weight.mul_(2)
        said.append(refused(RuntimeError, again))
        if rank == 1:
            weight.mul_(2)
        again()
    bias.data = bias.data * (rank + 1)
    said.append(refused(RuntimeError, again))
    bias.data = bias.data / (rank + 1)
    again()
    if rank == 1:
        nn.init.zeros_(bias)
        said.append(refused(RuntimeError, again))
    else:
        said.append(refused(RuntimeError, again))
    nn.init.zeros_(bias)
    again().sum().backward()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    if rank == 1:
        optimizer.step()
    said.append(refused(RuntimeError, again))
    if rank == 0:
        optimizer.step()
    again()
    if rank == 0:
        with torch.no_grad():
            said.append(refused(RuntimeError, lambda: bias.normal_()))
    else:
        said.append(refused(RuntimeError, again))
    again()
    return said


@torch.no_grad()
def copied() -> list[str]:
    """What is said of a copy of another tensor on each rank, and of a piece."""
    _, parallel = _pair(autopar.Mesh(dp=2), "fsdp")
    weight: Any = parallel.get_parameter("0.up.weight")
    other = torch.full(weight.shape, float(distributed.get_rank()), dtype=torch.float64)
    said = [refused(RuntimeError, lambda: weight.copy_(other))]
    return [*said, refused(RuntimeError, lambda: weight.copy_(torch.ones_like(weight.to_local())))]


def given_data() -> list[str]:
    """What is said of ``.data =``. A version counts no such write, and torch's own DTensors stay torch's."""
    _, parallel = _pair(autopar.Mesh(dp=2), "fsdp")
    weight: Any = parallel.get_parameter("0.up.weight")
    foreign: Any = distribute_tensor(torch.zeros_like(weight.full_tensor()).T, DeviceMesh("cpu", [1, 0]))
    foreign.data = foreign.data + 1
    assert not foreign.full_tensor().any()
    before, version, piece = weight.detach().full_tensor(), weight._version, weight._local_tensor
    values: list[Any] = [torch.ones(3), before.float(), weight.data[:1], foreign.data.t()]

    def give(value: torch.Tensor) -> None:
        weight.data = value

    said = [refused(NotImplementedError, lambda value=value: give(value)) for value in values]
    said.append(refused(RuntimeError, lambda: give(before + distributed.get_rank())))
    assert torch.equal(weight.full_tensor(), before)
    weight.data = before * 2
    assert torch.equal(weight.full_tensor(), before * 2)
    assert weight._version == version and weight._local_tensor is piece and piece._version == 0
    return said


def exchanges() -> list[int]:
    """How often ranks exchange more than their calls: in steps of an optimizer, and after a write."""
    _, parallel = _pair(autopar.Mesh(dp=2), "ddp")
    optimizer = torch.optim.AdamW(parallel.parameters())
    counts, gathered = [0], Agreement.gathered

    def counting(self: Agreement, value: Any) -> list[Any]:
        counts[-1] += 1
        return gathered(self, value)

    with torch.no_grad():
        parallel(_x())
    parallel(_x())
    Agreement.gathered = counting  # type: ignore[method-assign]
    try:
        for _ in range(3):
            parallel(_x()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            counts.append(0)
            parallel.get_parameter("0.up.bias").mul_(2)
            parallel(_x())
            counts.append(0)
            parallel(_x())
    finally:
        Agreement.gathered = gathered  # type: ignore[method-assign]
    return counts


def on_stages() -> None:
    """Parameters on stages have values on the ranks of one stage alone, and all ranks read them."""
    single, parallel = _pair(autopar.Mesh(pp=2), None)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.0), microbatches=2, schedule="1f1b")
    step(_x())
    for name, parameter in parallel.named_parameters():
        assert parameter.device_mesh.size() == 1, name
        one = single.get_parameter(name).detach()
        assert parameter.detach().norm().item() == one.norm().item(), name
        assert parameter.detach().tolist() == one.tolist(), name


def _give(data: Callable[[Any], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    return lambda w: setattr(w, "data", data(w))


def _restore(w: Any) -> None:
    """As averages do: other values for a while."""
    kept = w.data
    w.data = kept * 3
    w.grad.add_(w.data)
    w.data = kept


def _gathered(w: Any) -> torch.Tensor:
    return w.redistribute(placements=[Replicate()] * w.device_mesh.ndim) if isinstance(w, DTensor) else w


def _set(index: Any, value: Any) -> Callable[[torch.Tensor], Any]:
    return lambda w: w.__setitem__(index, value)


WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": _set(0, 0),
    "a row of the last rank": _set(-1, 0.5),
    "an element": _set((0, 1), 2.0),
    "a column": _set((slice(None), 1), 2),
    "rows": _set(slice(1, 7), 3.0),
    "a row from a tensor": _set(0, torch.arange(8.0, dtype=torch.float64)),
    "rows by numbers": _set(torch.tensor([0, 5]), 0),
    "a mask": lambda w: w.__setitem__(w < 0, 0),
    "a row from another": lambda w: w.__setitem__(0, 2 * w[-1]),
    "a part that is changed": lambda w: w.__setitem__(0, (w[0] * 2).add_(1)),
    "data": lambda w: w.data.__setitem__(0, 1),
    "flat": lambda w: w.view(-1).__setitem__(50, 1),
    "a column in place": lambda w: w.t()[1].zero_() if w.shape[0] > w.shape[1] else w.zero_(),
    "tril_": lambda w: w.tril_(),
    "fill_diagonal_": lambda w: w.fill_diagonal_(2.0),
    "copy_": lambda w: w.copy_(torch.arange(w.numel(), dtype=torch.float64).view(w.shape)),
    "copy_ of a row": lambda w: w.copy_(torch.arange(w.shape[1])),
    "copy_ of a number": lambda w: w.copy_(torch.tensor(3.0)),
    "copy_ to the data": lambda w: w.data.copy_(torch.arange(w.numel()).view(w.shape[::-1]).t()),
    "data of a whole tensor": _give(lambda w: torch.arange(w.numel(), dtype=torch.float64).view(w.shape)),
    "data, halved": _give(lambda w: w.data * 0.5),
    "data, clamped": _give(lambda w: w.data.clamp(-1, 1)),
    "data of other placements": _give(lambda w: _gathered(w.data) * 2),
    "data that was transposed": _give(lambda w: torch.arange(w.numel(), dtype=torch.float64).view(w.shape[::-1]).t()),
    "data that is restored": _restore,
    "data of data": lambda w: w.data.data.detach().mul_(2),
    "transposed in place": lambda w: w.T.add_(1),
    "data of a gradient": lambda w: setattr(w.grad, "data", w.grad.data * 2),
    "data of parts of a vector": lambda w: nn.utils.vector_to_parameters(torch.arange(96).double(), [w]),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([1, 5]), 1.0),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([1, 5]), torch.ones(2, 8, dtype=torch.float64)),
    "a gradient": lambda w: w.grad.__setitem__(3, 1),
}
LOST: list[Callable[[Any], Any]] = [
    lambda w: w[0].zero_(),
    lambda w: w[0].view(-1).mul_(2),
    lambda w: w.select(0, 1).add_(1),
    lambda w: w.chunk(5)[0].fill_(1),
    lambda w: w[1:3].__setitem__(0, 1),
    lambda w: w[0].__iadd__(1),
    lambda w: w[0].data.zero_(),
    lambda w: w[0].detach().zero_(),
    lambda w: w[1:4].T.zero_(),
    lambda w: w[1:4].transpose(0, 1)[0].fill_(2),
]


def elements(sizes: dict[str, int], plan: Any) -> list[str]:
    """Writes to elements. Returns what is refused, of a weight whose rows are split."""
    single, parallel = _pair(autopar.Mesh(sizes), plan)
    for model in (single, parallel):
        model(_x()).backward()
    for what, write in WRITES.items():
        with torch.no_grad():
            for model in (single, parallel):
                own = model.get_parameter("0.up.weight")
                own.sub_(0.1)
                write(own)
            one: Any
            one, here = single.get_parameter("0.up.weight"), parallel.get_parameter("0.up.weight")
            for value, wanted in ((here, one), (here.grad, one.grad)):
                assert torch.allclose(value.detach().full_tensor(), wanted.detach(), rtol=1e-11, atol=1e-11), what
    weight: Any = parallel.get_parameter("0.up.weight")
    before = weight.detach().full_tensor()
    for write in (lambda: weight.__setitem__(0, 1.0), lambda: weight.fill_diagonal_(2.0)):  # as on one device
        assert "a leaf Variable that requires grad" in refused(RuntimeError, write)
    assert torch.equal(weight.detach().full_tensor(), before)
    if plan == "ddp":
        return []
    with torch.no_grad():
        said = [
            refused(NotImplementedError, lambda w=write: w(parallel.get_parameter("0.up.weight"))) for write in LOST
        ]
    assert torch.equal(parallel.get_parameter("0.up.weight").detach().full_tensor(), before)
    return said
