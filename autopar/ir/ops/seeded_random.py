"""Register random ops that are functions of a seed.

Each random op has a twin in the namespace ``drawn`` with two more arguments.

    y = bernoulli(x, 0.9)       →       y = drawn::bernoulli.p(x, 0.9, seed=seed, stream=3)

``stream`` numbers the random ops of a step, in the order in which a single device calls them. The result depends on
these two alone, so reordering, recomputing or merging ops cannot change a number. ``seed`` is either one number, from
which each stream gets its own generator; then ranks with different pieces have different seeds (``folded``). Or it is a
table with the state of the device's generator for each stream; then the numbers are those of a single device, if the op
runs on whole operands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from autopar.torch_private import (
    OpOverload,
    default_generator,
    op_named,
    operator_schema,
    present,
    pytree,
    with_defaults,
)

Random = Literal["parallel", "single"]  # whose random numbers a step draws: each piece its own, or a single device's
RANDOM: tuple[Random, ...] = get_args(Random)

LIBRARY = torch.library.Library("drawn", "DEF")

FUNCTIONAL = {  # ops that fill a tensor → ops that return a new one
    "bernoulli_.float": "bernoulli.p", "bernoulli_.Tensor": "bernoulli.Tensor", "uniform_": "uniform",
    "normal_": "normal_functional", "exponential_": "exponential", "random_": "random", "random_.from": "random.from",
    "random_.to": "random.to", "cauchy_": "cauchy", "geometric_": "geometric", "log_normal_": "log_normal",
}  # fmt: skip

RRELU = "rrelu_with_noise"  # writes into its second operand, and returns another tensor

# the number of draws of these ops depends on values, so that the states of a single device's generator are not known in
# advance
REJECTING = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", RRELU})

# kernels that draw their dropout themselves, and return the state from which their own backward draws it again
FUSED_DROPOUT = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


FILLING = present({op_named(new): op_named(filling) for filling, new in FUNCTIONAL.items()})

_TWINS: dict[OpOverload, OpOverload] = {}
_SOURCES: dict[OpOverload, OpOverload] = {}


@dataclass(frozen=True)
class Draw:
    """One stream: the call that a single device makes, with shapes and dtypes in place of tensors.

    Attributes:
        order: the dims of the first tensor in memory order, if that differs from their numbers.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    order: list[int] | None = None


@dataclass(frozen=True)
class Like:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def twin_of(op: OpOverload) -> OpOverload:
    """Return the twin of ``op``: the op of a seed and a stream that computes the same distribution."""
    if op not in _TWINS:
        space, _, name = op.name().partition("::")
        name = name if space == "aten" else f"{space}__{name}"
        LIBRARY.define(name + operator_schema(op))
        packet, _, overload = name.partition(".")

        def draw(*args: Any, seed: torch.Tensor, stream: int, order: list[int] | None = None, **kwargs: Any) -> Any:
            device = _device(args, kwargs)
            generator = default_generator(device)
            before = generator.get_state()
            try:
                if not seed.dim():
                    generator.manual_seed(mixed(int(seed), stream))
                    return op(*args, **kwargs)
                generator.set_state(seed[stream].clone())  # cloned: a state with a storage offset crashes the process
                return _as_a_single_device(op, args, kwargs, order)
            finally:
                generator.set_state(before)

        def fake(*args: Any, seed: torch.Tensor, stream: int, order: list[int] | None = None, **kwargs: Any) -> Any:
            return op(*args, **kwargs)

        LIBRARY.impl(name, draw, "CompositeExplicitAutograd")
        torch.library.register_fake(f"drawn::{name}", fake, lib=LIBRARY)
        _TWINS[op] = getattr(getattr(torch.ops.drawn, packet), overload or "default")
        _SOURCES[_TWINS[op]] = op
    return _TWINS[op]


def _as_a_single_device(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], order: list[int] | None) -> Any:
    """Run the op on a first operand with this memory order, as a single device does.

    The memory order decides how many numbers are drawn and where they go.
    """
    if order is None:
        return op(*args, **kwargs)
    first, *rest = args
    as_it_lay = (
        first.permute(order)
        .clone(memory_format=torch.contiguous_format)
        .permute([order.index(d) for d in range(first.dim())])
    )
    return FILLING.get(op, op)(as_it_lay, *rest, **kwargs).contiguous()


def is_seeded_random(op: Any) -> bool:
    """Return whether an op is such a twin."""
    return op in _SOURCES


def source_of(op: Any) -> Any:
    """Return the op that a twin replaces; other ops are returned unchanged."""
    return _SOURCES.get(op, op)


def with_seed(pattern: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of a twin from that of its op: one operand more.

    With a table of states nothing is split: its numbers have one order.
    """

    def bound(*args: Any, seed: Any, stream: int, order: Any = None, **kwargs: Any) -> Any:
        if seed.shape:
            return None
        rule_text = pattern(*args, **kwargs) if callable(pattern) else pattern
        text, *sizes = rule_text if isinstance(rule_text, tuple) else (rule_text,)
        if not isinstance(text, str):
            return rule_text  # reading the rule raises the error
        operands, _, results = text.partition("->")
        text = f"{operands.strip()}, () -> {results.strip()}" if operands.strip() else f"() -> {results.strip()}"
        return (text, *sizes) if sizes else text

    if callable(pattern) and pattern.__doc__:
        bound.__doc__ = pattern.__doc__.replace(" ->", ", () ->", 1)
    return bound


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    tensor = next((leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)), None)
    return torch.device(kwargs.get("device") or "cpu") if tensor is None else tensor.device


def mixed(seed: int, number: int) -> int:
    """Return a different seed for each number, by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (seed + 0x9E3779B97F4A7C15 * (number + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & 0x7FFFFFFFFFFFFFFF


def folded(seed: torch.Tensor, place: int) -> torch.Tensor:
    """Return the seed of the ranks whose pieces are at ``place``."""
    return torch.tensor(mixed(int(seed), place), dtype=torch.int64)


def single_device_states(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """Return the state of the device's generator before each draw, and leave it as after all of them."""
    generator = default_generator(device)
    states = []
    for draw in draws:
        states.append(generator.get_state())
        args, kwargs = pytree.tree_map_only(
            Like, lambda like: torch.ones(like.shape, dtype=like.dtype, device=device), (draw.args, dict(draw.kwargs))
        )
        _as_a_single_device(draw.op, args, kwargs, draw.order)
    return torch.stack(states)


_MARK = 0x61757470617200  # a range of seeds that models do not set


# twins that use only the shape of their first operand
SHAPED = frozenset(
    twin_of(op) for name, new in FUNCTIONAL.items() if name != "bernoulli_.Tensor" and (op := op_named(new))
)


class Streams:
    """Number the random ops of one trace in the order in which a single device calls them.

    Each number belongs to a state of the global generator. If an activation checkpoint restores the state for its
    recomputation, the same op in the same state gets the same stream, and so the same numbers.
    """

    def __init__(self, seed: torch.Tensor) -> None:
        self.seed = seed
        self.draws: list[Draw] = []
        self._numbers: dict[int, int] = {}  # seed of the global generator, which changes with each draw → stream

    @contextlib.contextmanager
    def numbering(self) -> Iterator[None]:
        """Restore the global generator afterwards, because a capture must not change it."""
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_MARK)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)

    def draw(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the twin of a random op, and write the result to the tensor that the op would fill."""
        name = op.name().removeprefix("aten::")
        if name == RRELU:
            result, noise = self._draw(op_named(f"{RRELU}_functional"), args, kwargs, order=None)
            args[1].copy_(noise)
            return result
        if name in FUNCTIONAL:
            return args[0].copy_(
                self._draw(op_named(FUNCTIONAL[name]), *with_defaults(op, args, kwargs), order=_memory_order(args[0]))
            )
        return self._draw(op, args, kwargs, order=_memory_order(args[0]) if "_like" in name else None)

    def seeded_by_the_model(self) -> bool:
        """Return whether forward itself must have set the global generator's state."""
        return not 0 <= torch.default_generator.initial_seed() - _MARK <= len(self.draws)

    def _draw(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], order: list[int] | None) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        number = self._numbers.setdefault(torch.default_generator.initial_seed(), len(self._numbers))
        torch.default_generator.manual_seed(_MARK + number + 1)
        if number == len(self.draws):
            like_args, like_kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: Like(tuple(t.shape), t.dtype), (tuple(args), kwargs)
            )
            self.draws.append(Draw(op, like_args, like_kwargs, order))
        return twin_of(op)(*args, **kwargs, seed=self.seed, stream=number, **({"order": order} if order else {}))


def _memory_order(x: torch.Tensor) -> list[int] | None:
    """Return the dims of a tensor in memory order, in which a single device fills it.

    ``None`` if that is their own order.
    """
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    return None if x.is_contiguous() or order == list(range(x.dim())) else order
