"""A change of anything that decides a capture is a miss of the cache; without a change there is a hit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cache import cache as kept
from autopar.costs.machine import machine_from
from autopar.rules import registry
from autopar.rules.registry import register_rule

SOURCE = """
import os
import torch
from torch import nn

SCALE = 0.5
TABLE = {"act": torch.relu, "beta": 2.0}


class Config:
    floor = 0.0

    def __init__(self):
        self.gain, self.names = 1.5, ["a", "b"]


def helper(x, by=1.0):
    return x * by


def made(shift):
    def shifted(x):
        return x + shift
    return shifted


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.register_buffer("mean", torch.zeros(8))
        self.beta, self.config, self.function = 0.25, Config(), made(1.0)

    def forward(self, x, scale=1.0):
        y = TABLE["act"](self.up(x - self.mean)) * SCALE * self.config.gain + self.config.floor
        if self.training:
            y = y * self.beta
        if os.environ.get("NET_EXTRA"):
            y = y * 3.0
        return {"loss": helper(self.function(self.down(y))).square().mean() * scale}
"""
COUNT = 0


@pytest.fixture
def net(tmp_path: Path) -> Iterator[types.ModuleType]:
    global COUNT
    COUNT += 1
    yield loaded(tmp_path / "net.py", SOURCE, f"net_of_cache_{COUNT}")
    sys.modules.pop(f"net_of_cache_{COUNT}")


def loaded(path: Path, source: str, name: str) -> types.ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source, str(path), "exec"), vars(module))
    return module


X = torch.zeros(8, 8)


def start(folder: Path, model: nn.Module, args: tuple[Any, ...] = (X,), mesh: Any = None, plan: Any = "ddp",
          **options: Any) -> str:  # fmt: skip
    """What came of the look into the cache, at the start of a program."""
    mesh = mesh or autopar.Mesh(dp=2)
    parallel = autopar.parallelize(model, mesh, plan, example=args, cache=folder, **options)
    return parallel.reports["cache"].notes[0].replace(str(folder), "FOLDER")


def start_step(folder: Path, model: nn.Module, make: Any = torch.optim.AdamW, plan: Any = "ddp", lr: float = 0.1,
               numbers: dict[str, Any] | None = None, **options: Any) -> str:  # fmt: skip
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), plan, cache=folder)
    step = parallel.train_step(make(parallel.parameters(), lr=lr, **(numbers or {})), **options)
    step.capture(X)
    notes = [report.notes[0] for report in step.reports if report.name.endswith("cache")]
    return " | ".join(notes).replace(str(folder), "FOLDER")


def test_the_same_start_is_a_hit(net: types.ModuleType, tmp_path: Path) -> None:
    assert start(tmp_path / "c", net.Net()).startswith("miss: nothing was kept before; kept as ")
    assert start(tmp_path / "c", net.Net()).startswith("hit: ")
    first, second = start_step(tmp_path / "c", net.Net()), start_step(tmp_path / "c", net.Net())
    assert first.count("miss") == 2 and second.count("hit") == 2, (first, second)


def set_in(holder: str, name: str, value: Any) -> Callable[[types.ModuleType, nn.Module], None]:
    def change(net: types.ModuleType, model: nn.Module) -> None:
        target: Any = net if holder.startswith("net") else model
        for part in holder.split(".")[1:]:
            target = getattr(target, part)
        setattr(target, name, value)

    return change


def tied(net: types.ModuleType, model: Any) -> None:
    model.down.weight = nn.Parameter(model.up.weight.detach().T.contiguous())
    model.other = model.up


def of_model(change: Callable[[Any], Any]) -> Callable[[types.ModuleType, nn.Module], None]:
    return lambda net, model: [change(model)].clear()


MODELS: dict[str, Callable[[types.ModuleType, Any], None]] = {
    "an attribute": set_in("model", "beta", 0.5),
    "an attribute's type": set_in("model", "beta", 1),
    "a config's attribute": set_in("model.config", "gain", 2.5),
    "a config's attribute that was its class's": set_in("model.config", "floor", 1.0),
    "an attribute of a class": set_in("net.Config", "floor", 1.0),
    "a global": set_in("net", "SCALE", 0.75),
    "an entry of a global": lambda net, model: net.TABLE.update(act=torch.tanh),
    "a function": lambda net, model: setattr(net, "helper", lambda x, by=1.0: x + by),
    "a default": lambda net, model: setattr(net.helper, "__defaults__", (2.0,)),
    "a closure": lambda net, model: setattr(model, "function", net.made(2.0)),
    "a method": lambda net, model: setattr(net.Net, "forward", lambda self, x, scale=1.0: self.up(x).mean()),
    "a forward of the instance": lambda net, model: setattr(model, "forward", lambda x, scale=1.0: model.up(x).mean()),
    "a hook": of_model(lambda model: model.up.register_forward_hook(lambda module, args, out: out * 2)),
    "the mode": of_model(lambda model: model.eval()),
    "the mode of a part": of_model(lambda model: model.up.eval()),
    "a frozen parameter": of_model(lambda model: model.up.weight.requires_grad_(False)),
    "a dtype": of_model(lambda model: model.double()),
    "a device": of_model(lambda model: model.to("meta")),
    "a shape": lambda net, model: (setattr(model, "up", nn.Linear(8, 24, bias=False)),
                                   setattr(model, "down", nn.Linear(24, 8, bias=False)))[0],
    "a parameter more": lambda net, model: setattr(model, "up", nn.Linear(8, 16)),
    "the strides of a parameter": lambda net, model: setattr(
        model.up, "weight", nn.Parameter(model.up.weight.detach().T.contiguous().T)),
    "another class": lambda net, model: setattr(model, "up", type("Own", (nn.Linear,), {})(8, 16, bias=False)),
    "a tied parameter": tied,
    "a buffer's place": lambda net, model: setattr(model.up, "extra", nn.Buffer(torch.zeros(1))),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_change_of_the_model_is_a_miss(net: types.ModuleType, tmp_path: Path, name: str) -> None:
    start(tmp_path / "c", net.Net())
    assert start(tmp_path / "c", net.Net()).startswith("hit")
    model = net.Net()
    MODELS[name](net, model)
    args = tuple(x.to(model.up.weight) for x in (X,))
    said = start(tmp_path / "c", model, args)
    assert said.startswith("miss") or said.startswith("not used"), said


def test_other_source_text_is_a_miss(net: types.ModuleType, tmp_path: Path) -> None:
    """The module is loaded again from a file that has changed, under its name."""
    start(tmp_path / "c", net.Net())
    for change in (
        ("* SCALE", "* SCALE * 2"),
        ("x * by", "x / by"),
        ("x + shift", "x - shift"),
        ("import os", "\nimport os"),
    ):
        again = loaded(tmp_path / "net.py", SOURCE.replace(*change), net.__name__)
        assert start(tmp_path / "c", again.Net()).startswith("miss"), change
    again = loaded(tmp_path / "net.py", SOURCE, net.__name__)
    assert start(tmp_path / "c", again.Net()).startswith("hit")


CALLS: dict[str, dict[str, Any]] = {
    "a shape": {"args": (torch.zeros(4, 8),)},
    "a dtype": {"args": (X.double(),)},
    "a gradient": {"args": (torch.zeros(8, 8, requires_grad=True),)},
    "strides": {"args": (torch.zeros(8, 8).T[:],)},
    "a constant": {"args": (X, 2.0)},
    "a constant's type": {"args": (X, 1)},
    "a keyword": {"args": ((), {"x": X})},
    "a mesh": {"mesh": autopar.Mesh(dp=4)},
    "an axis": {"mesh": autopar.Mesh(tp=2)},
    "a plan": {"plan": "fsdp"},
    "a plan by names": {"plan": {"*.up.weight": ("dp", None)}},
    "a search": {"plan": "search"},
    "no plan": {"plan": None},
    "outputs": {"outputs": "global"},
    "random": {"random": "single"},
    "strict": {"strict": True},
    "overlap": {"overlap": "today"},
    "a machine": {"machine": "NVIDIA H100 80GB HBM3"},
    "dynamic": {"dynamic": False},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_change_of_the_call_or_an_option_is_a_miss(net: types.ModuleType, tmp_path: Path, name: str) -> None:
    start(tmp_path / "c", net.Net())
    options = dict(CALLS[name])
    model = net.Net().double() if name == "a dtype" else net.Net()
    if name == "strides":
        options["args"] = (torch.zeros(8, 8).T.contiguous().T,)
    said = start(tmp_path / "c", model, **options)
    assert said.startswith("miss") and "nothing was kept" not in said, said
    model = net.Net().double() if name == "a dtype" else net.Net()
    assert start(tmp_path / "c", model, **options).startswith("hit")


@pytest.mark.parametrize("figure", ["capacity", "interference", "start", "note", "ranks_per_node"])
def test_each_figure_of_the_machine_counts(net: types.ModuleType, tmp_path: Path, figure: str) -> None:
    machine = machine_from("NVIDIA H100 80GB HBM3")
    start(tmp_path / "c", net.Net(), machine=machine)
    assert start(tmp_path / "c", net.Net(), machine=machine).startswith("hit")
    other = {"capacity": 1e9, "interference": 0.5, "start": 1e-6, "note": "other", "ranks_per_node": 1}[figure]
    assert start(tmp_path / "c", net.Net(), machine=dataclasses.replace(machine, **{figure: other})).startswith("miss")


STEPS: dict[str, dict[str, Any]] = {
    "amp": {"amp": "bf16-O1"},
    "zero": {"zero": 1},
    "micro-batches": {"microbatches": 2},
    "recompute": {"recompute": "*.up"},
    "clip_norm": {"clip_norm": 1.0},
    "grad_norm": {"grad_norm": True},
    "clip_norm and another": {"clip_norm": 2.0},
    "ema": {"ema": 0.5},
    "returns": {"returns": "outputs"},
    "across": {"across": True},
    "overlap": {"overlap": "today"},
    "memory": {"memory": 1e9},
    "time_limit": {"time_limit": 1.0},
    "an optimizer": {"make": torch.optim.Adam},
    "another optimizer": {"make": torch.optim.SGD},
    "a truth of the optimizer": {"numbers": {"maximize": True}},
    "another truth": {"numbers": {"amsgrad": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_change_of_the_step_is_a_miss(net: types.ModuleType, tmp_path: Path, name: str) -> None:
    start_step(tmp_path / "c", net.Net())
    assert start_step(tmp_path / "c", net.Net()).count("hit") == 2
    assert "miss" in start_step(tmp_path / "c", net.Net(), **STEPS[name])
    assert start_step(tmp_path / "c", net.Net(), **STEPS[name]).count("hit") == 2


def test_numbers_that_schedulers_change_are_no_part_of_the_key(net: types.ModuleType, tmp_path: Path) -> None:
    start_step(tmp_path / "c", net.Net())
    assert start_step(tmp_path / "c", net.Net(), lr=0.2, numbers={"weight_decay": 0.5}).count("hit") == 2


def setting(set_: Callable[[Any], Any], value: Any, before: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: set_(value), lambda: set_(before)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "deterministic": setting(torch.use_deterministic_algorithms, True, False),
    "matmul precision": setting(torch.set_float32_matmul_precision, "high", "highest"),
    "default dtype": setting(torch.set_default_dtype, torch.float64, torch.float32),
    "attention": setting(torch.backends.cuda.enable_math_sdp, False, True),
    "gradients": setting(torch.set_grad_enabled, False, True),
    "autocast": setting(lambda on: torch.set_autocast_enabled("cpu", on), True, False),
    "a variable that forward reads": (lambda: os.environ.update(NET_EXTRA="1"), lambda: os.environ.pop("NET_EXTRA")),
    "a variable of torch": (lambda: os.environ.update(TORCH_LOGS_X="1"), lambda: os.environ.pop("TORCH_LOGS_X")),
    "a hook of all modules": (
        lambda: HOOKS.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: None)),
        lambda: HOOKS.pop().remove(),
    ),
}  # fmt: skip
HOOKS: list[Any] = []


@pytest.mark.parametrize("name", SETTINGS)
def test_a_change_of_what_surrounds_the_capture_is_a_miss(net: types.ModuleType, tmp_path: Path, name: str) -> None:
    start(tmp_path / "c", net.Net())
    model = net.Net()
    change, back = SETTINGS[name]
    change()
    try:
        said = start(tmp_path / "c", model)
    finally:
        back()
    assert said.startswith("miss"), said
    assert start(tmp_path / "c", net.Net()).startswith("hit")


def test_versions_and_own_sources_count(net: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path / "c", net.Net())
    for name, value in (("sources_digest", lambda: "other"), ("FORMAT", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(kept, name, value)
            assert start(tmp_path / "c", net.Net()).startswith("miss: other ")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "9.9.9")
        assert start(tmp_path / "c", net.Net()).startswith("miss: other versions")
    assert start(tmp_path / "c", net.Net()).startswith("hit")


def test_a_registered_rule_counts(net: types.ModuleType, tmp_path: Path) -> None:
    start(tmp_path / "c", net.Net())
    op = torch.ops.aten.relu.default
    before = registry.RULES[op]
    try:
        register_rule("... -> ...", op)
        assert start(tmp_path / "c", net.Net()).startswith("miss: other rules")
        register_rule(lambda x: "... -> ...", op)
        assert "is a function" in start(tmp_path / "c", net.Net())
    finally:
        registry.RULES[op] = before
        registry.REGISTERED.clear()


def test_a_value_that_changes_after_a_hit_is_captured_anew(net: types.ModuleType, tmp_path: Path) -> None:
    start(tmp_path / "c", net.Net())
    model = net.Net()
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), "ddp", example=(X,), cache=tmp_path / "c")
    assert parallel.reports["cache"].notes[0].startswith("hit")
    x = torch.randn(8, 8)
    for change in (None, lambda: setattr(model, "beta", 0.5), lambda: setattr(net, "SCALE", 3.0),
                   lambda: setattr(model.config, "gain", 3.0), lambda: model.eval()):  # fmt: skip
        if change is not None:
            change()
        torch.testing.assert_close(parallel.simulate(x), model(x))
    assert parallel.captures == 5
