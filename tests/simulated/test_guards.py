"""Python values that forward reads: where one has changed, a call captures anew, or goes back to an earlier capture, as
eager does."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import guarded_models
import pytest
import torch
import torch.nn.functional as F
from casts import promoted_casts  # noqa: F401
from equality import TOLERANCE, relative
from guarded_models import CONFIG, TABLE, Config, Inner, Reader, Weighted
from torch import nn
from transformers_models import bert, float64, gpt2, llama

import autopar
from autopar import CaptureError, Mesh
from autopar.capture.guards.variants import KEPT

d = torch.float64


def half(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def one_more(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def in_module(name: str, value: Any) -> Callable[[Reader], None]:
    return lambda model: setattr(guarded_models, name, value)


CHANGES: dict[str, tuple[Callable[[Reader], Any], str]] = {  # what is changed, and what the report calls it
    "a float": (lambda m: setattr(m, "beta", 3.0), "beta is 3.0, it was 1.0"),
    "a float to an int": (lambda m: setattr(m, "beta", 1), "beta is 1, it was 1.0"),
    "a float to nan": (lambda m: setattr(m, "beta", math.nan), "beta is nan, it was 1.0"),
    "a float to minus "
    "zero": (lambda m: setattr(m, "weights", [0.5, -0.0]), "weights is [0.5, -0.0], it was [0.5, 0.25]"),
    "a flag": (lambda m: setattr(m, "flag", True), "flag is True, it was False"),
    "an index of a layer": (lambda m: setattr(m, "which", 1), "which is 1, it was 0"),
    "a dtype": (lambda m: setattr(m, "kind", torch.float32), "kind is torch.float32, it was torch.float64"),
    "dropout": (lambda m: setattr(m.drop, "p", 1.0), "drop.p is 1.0, it was 0.0"),
    "a class attribute": (lambda m: setattr(Reader, "offset", 1.25), "offset is 1.25, it was 0.25"),
    "an attribute that hides one of the "
    "class": (lambda m: setattr(m, "offset", 2.25), "offset is 2.25, it was missing"),
    "a new attribute": (lambda m: setattr(m, "extra", 4), "extra is 4, it was missing"),
    "an entry of a list": (lambda m: m.weights.__setitem__(0, 0.125), "weights is [0.125, 0.25], it was [0.5, 0.25]"),
    "an entry of a "
    "dict": (lambda m: m.options.update(gain=2.5),
             "options is {'gain': 2.5, 'deep': [{'on': True}]}, it was {'gain': 1.0, 'deep': [{'on': True}]}"),
    "an entry deep in a "
    "dict": (lambda m: m.options["deep"][0].update(on=False),
             "options is {'gain': 1.0, 'deep': [{'on': False}]}, it was {'gain': 1.0, 'deep': [{'on': True}]}"),
    "a config": (lambda m: setattr(m.config, "mode", "minus"), "config.mode is 'minus', it was 'plus'"),
    "a config in a config, through a "
    "property": (lambda m: setattr(m.config.inner, "scale", 0.5), "config.inner.scale is 0.5, it was 1.5"),
    "a list of a config": (lambda m: m.config.sizes.append(3), "config.sizes is [1, 2, 3], it was [1, 2]"),
    "another "
    "config": (lambda m: setattr(m, "config", Config(inner=Inner(7.0))), "config is another Config, it was a Config"),
    "a slot": (lambda m: setattr(m.slotted, "shift", 1.0), "slotted.shift is 1.0, it was 0.5"),
    "a namespace": (lambda m: setattr(m.names, "bias", 0.75), "names is {'bias': 0.75}, it was {'bias': 0.5}"),
    "options of argparse": (lambda m: setattr(m.args, "clip", 0.75), "args is {'clip': 0.75}, it was {'clip': 0.1}"),
    "a function": (lambda m: setattr(m, "act", torch.sin), "act is the function sin, it was the function tanh"),
    "a number of a "
    "closure": (lambda m: m.change(5.0), "power of the closure closed_over.<locals>.function is 5.0, it was 1.0"),
    "a global that a function "
    "reads": (in_module("FACTOR", 4.0), "the global FACTOR of guarded_models is 4.0, it was 2.0"),
    "a global "
    "config": (lambda m: setattr(CONFIG.inner, "scale", 4.5),
               "the global CONFIG of guarded_models.inner.scale is 4.5, it was 1.5"),
    "a global "
    "table": (lambda m: TABLE["a"].__setitem__(0, 8.0),
              "the global TABLE of guarded_models is {'a': [8.0, 2.0]}, it was {'a': [1.0, 2.0]}"),
    "a plain tensor": (lambda m: setattr(m, "plain", m.plain + 1), "plain is another tensor [], it was a tensor []"),
    "a plain tensor, in "
    "place": (lambda m: m.plain.add_(1), "plain is a tensor [] with other contents, it was a tensor []"),
    "a hook": (lambda m: m.l.register_forward_hook(half), "l._forward_hooks is [function half], it was []"),
    "a hook "
    "before": (lambda m: m.l.register_forward_pre_hook(one_more),
               "l._forward_pre_hooks is [function one_more], it was []"),
    "another forward": (lambda m: setattr(m.l, "forward", twice), "l.forward is the function twice, it was missing"),
    "another "
    "module": (lambda m: m._modules.__setitem__("drop", nn.Tanh()),
               "module 2 of the model is a Tanh, it was a Dropout"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def globals_put_back() -> Any:
    """What some changes change beside the model."""
    yield
    guarded_models.FACTOR, Reader.offset, CONFIG.inner.scale = 2.0, 0.25, 1.5
    TABLE["a"][0] = 1.0


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and (
        relative(ours, theirs) <= TOLERANCE or bool(ours.isnan().all() and theirs.isnan().all())
    )


def change_after_change(cases: Iterable[str]) -> None:
    """With the numbers of eager, before and after; the report names what was changed; and unchanged it is captured
    once."""
    model, x = Reader(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for _ in range(2):
        assert close(parallel.simulate(x), model(x))
    assert parallel.captures == 1
    for captures, case in enumerate(cases, 2):
        change, said = CHANGES[case]
        change(model)
        for _ in range(2):
            assert close(parallel.simulate(x), model(x)), case
        assert parallel.captures == captures, case
        assert f"capture {captures} of this model: {said}" in parallel.reports[0].notes, case


LAST = ("a float to nan", "dropout")  # they hide what comes after them


def groups(count: int) -> list[list[str]]:
    """The changes in groups, of which each changes another thing than the others of its group."""
    alike = sorted(CHANGES, key=lambda case: CHANGES[case][1])
    return [sorted(alike[k::count], key=LAST.__contains__) for k in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("cases", groups(8), ids=", ".join)
def test_what_is_changed_is_captured_anew(cases: list[str]) -> None:
    change_after_change(cases)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.sweep("it is there behind others")) for case in CHANGES]
)
def test_what_is_changed_alone_is_captured_anew(case: str) -> None:
    change_after_change([case])


def test_earlier_values_find_their_captures_and_only_so_many_are_kept() -> None:
    model, x = Reader(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    for which, flag in ((0, False), (1, False), (0, True), (0, False), (1, False), (0, True)):
        model.which, model.flag = which, flag
        assert close(parallel.simulate(x), model(x))
    assert parallel.captures == 3
    small = nn.Linear(4, 4, dtype=d)
    small.act = "0"
    small.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) + len(self.act) + int(self.act), small)
    parallel = autopar.parallelize(small, Mesh(dp=1), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.0))
    with pytest.warns(UserWarning) as caught:
        for k in range(KEPT + 2):
            small.act = str(k)
            assert close(parallel(x), small(x))
    assert len(caught) == 1 and str(caught[0].message).startswith(
        "forward reads act, and each new value captures the step anew (act is '2', it was '1')\n    test_guards.py:"
    )
    assert parallel.captures == KEPT and len(parallel._calls.captures.variants._of) == 1 and not step.captures


def test_a_change_is_refused_without_recapture() -> None:
    model, x = Weighted(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,), recapture=False)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    step.simulate(x)
    model.beta = 0.5
    for call in (parallel.simulate, step.simulate):
        with pytest.raises(RuntimeError) as caught:
            call(x)
        assert str(caught.value) == (
            "forward was captured with other values, and recapture=False: beta is 0.5, it was 0.0; restore these "
            "values, or allow recapture=True"
        )
    model.beta = 0.0
    assert relative(parallel.simulate(x), model(x)) <= TOLERANCE
    step.simulate(x)


def test_attributes_are_set_through_what_is_returned() -> None:
    """``parallel.beta`` is the model's; so are those of its modules, and deleting them."""
    model, x = Reader(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
    parallel.beta, parallel.drop.p, parallel.config.mode, parallel.extra = 2.0, 0.0, "minus", 3
    assert (model.beta, model.config.mode, model.extra, parallel.beta, parallel.offset) == (2.0, "minus", 3, 2.0, 0.25)
    assert close(parallel.simulate(x), model(x)) and parallel.captures == 2
    del parallel.extra
    assert not hasattr(model, "extra") and not hasattr(parallel, "extra")
    assert close(parallel.simulate(x), model(x))
    with pytest.raises(AttributeError, match="'Parallel' object has no attribute 'nothing'"):
        parallel.nothing  # noqa: B018


def test_what_forward_counts_up_is_said() -> None:
    """A number that forward changes and uses is refused; with its first value kept it is not captured anew."""

    class Warming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.calls = nn.Linear(4, 4, dtype=d), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.l(x) * min(self.calls / 10, 1.0)

    model, x = Warming(), torch.randn(4, 4, dtype=d)
    with pytest.raises(CaptureError, match=r"^forward reads and changes calls, and a captured step keeps the value"):
        autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,), first_values="keep")
    for _ in range(3):
        parallel.simulate(x)
    assert (parallel.captures, model.calls) == (1, 0)


class OnOneLine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 1

    # fmt: off
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.count; self.count = self.count + 1; return y  # noqa: E702
    # fmt: on


def test_statements_on_one_line_are_told_apart() -> None:
    with pytest.raises(CaptureError, match=r"^forward reads and changes count, and"):
        autopar.parallelize(OnOneLine(), Mesh(dp=2), "ddp", example=(torch.randn(4, 4),))


def test_what_forward_changes_in_its_config_once_is_captured_once() -> None:
    class Decides(Reader):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.config.mode == "plus":
                self.config.mode = "minus"
            return super().forward(x)

    model, x = Decides(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for _ in range(3):
        assert close(parallel.simulate(x), model(x))
    assert parallel.captures == 1


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=11,
            d_model=16,
            d_kv=4,
            d_ff=16,
            num_layers=1,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ).double()


@pytest.mark.long
@float64
@pytest.mark.parametrize(
    "make",
    [
        llama,
        t5,
        pytest.param(gpt2, marks=pytest.mark.sweep("llama has one config too")),
        pytest.param(bert, marks=pytest.mark.sweep("llama has one config too")),
    ],
)
def test_models_of_hugging_face_are_captured_once_and_again_where_their_config_changes(
    make: Callable[[], nn.Module],
) -> None:
    """Their forwards write flags and caches, which is no change; what they return is one."""
    model = make().eval()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(1, 11, (4, 6))
        given = {"input_ids": ids, "labels": ids}
        with torch.no_grad():
            ours, theirs = parallel.simulate(**given), model(**given)
    assert parallel.captures == 1 and relative(ours[0], theirs[0]) <= TOLERANCE
    # each with a config of its own
    for module in (model, *(getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name))):
        module.config.output_hidden_states = True
    with torch.no_grad():
        ours, theirs = parallel.simulate(**given), model(**given)
    assert parallel.captures == 2 and ours.keys() == theirs.keys() and relative(ours[0], theirs[0]) <= TOLERANCE
