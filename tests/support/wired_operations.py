"""Run every operation of a process group on a group of gloo and on an emulated wire, and compare what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from wired import agreed_times, wire

from autopar.runtime.wire.clock import now

Operation = Callable[[Any, Callable[..., torch.Tensor]], Any]  # of a group; makes tensors from a shape


def _all_reduce(op: Any) -> Operation:
    def run(group: Any, make: Callable[..., torch.Tensor]) -> Any:
        x = make(1001)
        distributed.all_reduce(x, op, group=group)
        return x

    return run


def _broadcast(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    x = make(37)
    distributed.broadcast(x, 1, group=group)
    return x


def _reduce(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    x = make(37)
    distributed.reduce(x, 1, group=group)
    return x if distributed.get_rank() == 1 else None


def _all_gather(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out = [torch.empty_like(make(5)) for _ in range(group.size())]
    distributed.all_gather(out, make(5), group=group)
    return out


def _all_gather_single(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out = torch.empty_like(make(5 * group.size()))
    distributed.all_gather_into_tensor(out, make(5), group=group)
    return out


def _reduce_scatter(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out = torch.empty_like(make(101))
    distributed.reduce_scatter(out, [make(101) for _ in range(group.size())], group=group)
    return out


def _reduce_scatter_single(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out = torch.empty_like(make(101, 2))
    distributed.reduce_scatter_tensor(out, make(101 * group.size(), 2), group=group)
    return out


def _all_to_all_single(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out = torch.empty_like(make(3 * group.size()))
    distributed.all_to_all_single(out, make(3 * group.size()), group=group)
    return out


def _uneven_all_to_all(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    """Rank r sends s + 1 rows to rank s."""
    sent = [s + 1 for s in range(group.size())]
    out = torch.empty_like(make(group.size() * (group.rank() + 1), 2))
    distributed.all_to_all_single(out, make(sum(sent), 2), [group.rank() + 1] * group.size(), sent, group=group)
    return out


def _all_to_all(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out = [torch.empty_like(make(4)) for _ in range(group.size())]
    distributed.all_to_all(out, [make(4) for _ in range(group.size())], group=group)
    return out


def _gather(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    root = distributed.get_rank() == 1
    out = [torch.empty_like(make(4)) for _ in range(group.size())] if root else None
    distributed.gather(make(4), out, 1, group=group)
    return out


def _scatter(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out = torch.empty_like(make(4))
    distributed.scatter(out, [make(4)] * group.size() if distributed.get_rank() == 1 else None, 1, group=group)
    return out


def _coalesced_all_reduce(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    xs = [make(5), make(7)]
    group.allreduce_coalesced(xs, distributed.AllreduceCoalescedOptions()).wait()
    return xs


def _functional(name: str, *more: Any) -> Operation:
    def run(group: Any, make: Callable[..., torch.Tensor]) -> Any:
        op = getattr(torch.ops._c10d_functional, name)
        result = op(_of_functional(name, group, make), *more, *_size(name, group), group.group_name)
        results = result if isinstance(result, list) else [result]
        return [torch.ops._c10d_functional.wait_tensor(one) for one in results]

    return run


def _of_functional(name: str, group: Any, make: Callable[..., torch.Tensor]) -> Any:
    x = make(6 * group.size())
    return [x, make(2 * group.size())] if "coalesced" in name else x


def _size(name: str, group: Any) -> tuple[int, ...]:
    return (group.size(),) if "gather" in name or "scatter" in name else ()


def _objects(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    out: list[Any] = [None] * group.size()
    distributed.all_gather_object(out, {"rank": distributed.get_rank()}, group=group)
    return out


def _barrier(group: Any, make: Callable[..., torch.Tensor]) -> Any:
    distributed.barrier(group=group)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": _all_reduce(distributed.ReduceOp.SUM),
    "all_reduce_max": _all_reduce(distributed.ReduceOp.MAX),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "uneven_all_to_all": _uneven_all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "all_reduce_coalesced": _coalesced_all_reduce,
    "functional_all_reduce": _functional("all_reduce", "sum"),
    "functional_all_reduce_coalesced": _functional("all_reduce_coalesced", "sum"),
    "functional_all_gather": _functional("all_gather_into_tensor"),
    "functional_all_gather_coalesced": _functional("all_gather_into_tensor_coalesced"),
    "functional_reduce_scatter": _functional("reduce_scatter_tensor", "sum"),
    "functional_reduce_scatter_coalesced": _functional("reduce_scatter_tensor_coalesced", "sum"),
    "functional_broadcast": _functional("broadcast", 1),
    "objects": _objects,
    "barrier": _barrier,
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def maker(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a function that makes other values at each call, and on each rank."""
    generator = torch.Generator().manual_seed(distributed.get_rank())
    return lambda *shape: (10 * torch.randn(shape, generator=generator).abs()).to(dtype)


def equal_values() -> None:
    """Every operation has gloo's bits, and meets the wire once."""
    gloo, wired = distributed.new_group(backend="gloo"), distributed.group.WORLD
    for dtype in DTYPES:
        for name, run in OPERATIONS.items():
            expected = run(gloo, maker(dtype))
            wire().reset()
            found = run(wired, maker(dtype))
            assert now() >= max(one.end for one in wire().records), name
            assert len(wire().records) == (2 if name == "objects" else 1), (name, wire().records)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{name} of {dtype}")
    distributed.destroy_process_group(gloo)


def rooted_operations_begin_together() -> None:
    """The root of a broadcast may have sent all its data before the others have come."""
    group = distributed.group.WORLD
    assert group is not None
    for run in (_broadcast, _reduce, _gather, _scatter, _barrier):
        wire().reset()
        run(group, torch.ones)
        agreed_times(wire().records[:1])
