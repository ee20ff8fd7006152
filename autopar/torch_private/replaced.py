"""Replace functions of torch while a block traces, where a trace cannot follow them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._prims_common import infer_size  # tried on 2.11 to 2.15: the sizes of a view, with -1 replaced

from autopar.torch_private.tracing import FakeTensor

NO_DIMS = torch.Size()


@contextlib.contextmanager
def value_checks_replaced(by: Callable[[], None]) -> Iterator[None]:
    """Call ``by`` instead of each check that reads a tensor's values only to raise an error.

    These are ``torch._check_tensor_all``, and the checks of distributions, which also check nothing later.
    ``nn.Transformer`` does not look whether an unspecified mask is causal, which it does only for speed, and
    ``gaussian_nll_loss`` does not look for variances below 0. Tried on 2.11 to 2.15.
    """
    library: Any = torch  # of no type, because its functions are replaced
    kind: Any = torch.distributions.Distribution
    transformer, functional = torch.nn.modules.transformer, torch.nn.functional
    originals = torch._check_tensor_all, torch._check_tensor_all_with, kind.__init__, transformer._detect_is_causal_mask
    gaussian, look = functional.gaussian_nll_loss, torch.any

    def make(
        self: Any, batch_shape: Any = NO_DIMS, event_shape: Any = NO_DIMS, validate_args: bool | None = None
    ) -> None:
        if self._validate_args if validate_args is None else validate_args:
            by()
        originals[2](self, batch_shape, event_shape, validate_args=False)

    def gaussian_nll_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        by()
        library.any = lambda *_: False
        try:
            return gaussian(*args, **kwargs)
        finally:
            library.any = look

    functional.gaussian_nll_loss = gaussian_nll_loss
    library._check_tensor_all = library._check_tensor_all_with = lambda *args, **kwargs: by()
    kind.__init__ = make
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        library._check_tensor_all, library._check_tensor_all_with, kind.__init__ = originals[:3]
        transformer._detect_is_causal_mask = originals[3]
        functional.gaussian_nll_loss = gaussian


@contextlib.contextmanager
def conversions_replaced(by: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Call ``by`` where a module is converted, as by ``module.to(dtype)``, and that changes a tensor.

    Tried on 2.11 to 2.15.
    """
    kind: Any = torch.nn.Module  # of no type, because its method is replaced
    convert = kind._apply

    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            if any(fn(tensor) is not tensor for tensor in tensors):
                by(self)
        return self

    kind._apply = apply
    try:
        yield
    finally:
        kind._apply = convert


@contextlib.contextmanager
def lists_replaced(by: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Call ``by`` for ``tolist()`` of a fake tensor, which has a method of its own. Tried on 2.11 to 2.15."""
    kind: Any = FakeTensor  # of no type, because its method is replaced
    before = kind.tolist
    kind.tolist = lambda self: by(self)
    try:
        yield
    finally:
        kind.tolist = before


@contextlib.contextmanager
def zero_tensors_viewed() -> Iterator[None]:
    """Keep views of forward mode's zero tensors on their device under fake tensors.

    ``vmap(hessian(f))`` makes such views. torch's own kernels return the inner tensor of the fake tensor, which is on
    meta. Tried on 2.11 to 2.15.
    """

    def view(tensor: torch.Tensor, size: Sequence[int], *_: Any) -> torch.Tensor:
        return torch._efficientzerotensor(
            infer_size(tuple(size), tensor.numel()), dtype=tensor.dtype, device=tensor.device
        )

    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that a kernel exists already
            for name in ("view", "_reshape_alias", "as_strided"):
                library.impl(name, view, "ZeroTensor", allow_override=True)
        yield


@contextlib.contextmanager
def compiled_parts_in_eager() -> Iterator[None]:
    """Run functions of torch.compile as plain Python while this block traces them. Tried on 2.11 to 2.15."""
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
        )  # capture installs them
        yield
