"""Wrong input: one clear error each, which names the offender and the remedy, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from models import Block
from test_equality import check_equal
from torch import nn
from torch.nn.utils import prune

import autopar
from autopar import CaptureError, Mesh, PlanError, RuleError
from autopar.rules.registry import RULES

HERE = re.escape("test_bad_input.py")
x = torch.randn(4, 8)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: (id(value), value.clone(), value.grad) for name, value in model.state_dict(keep_vars=True).items()}


def refuses(error: type[Exception], text: str, model: nn.Module, mesh: Any = None, plan: Any = None, example: Any = (x,),
            **options: Any) -> None:  # fmt: skip
    """``parallelize`` raises ``error`` with exactly ``text`` (a regular expression), and the model is untouched."""
    mesh = Mesh(dp=2, tp=2) if mesh is None else mesh
    before = snapshot(model)
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    with pytest.raises(error) as caught:
        autopar.parallelize(model, mesh, plan, example=example, **options)
    assert re.fullmatch(text, str(caught.value)), str(caught.value)
    after = snapshot(model)
    assert before.keys() == after.keys()
    for name, (identity, value, grad) in before.items():
        assert identity == after[name][0] and torch.equal(value, after[name][1]) and grad is after[name][2]
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks


PLANS = {
    "unknown axis": (
        {"*.up.weight": ("tq", None)},
        r"the plan's '\*\.up\.weight': \('tq', None\): the mesh \(dp=2 tp=2\) has no axis 'tq'; "
        r"its axes are dp, tp; did you mean 'tp'\?",
    ),
    "no match": (
        {"*.upp.weight": ("tp", None)},
        r"the plan's glob '\*\.upp\.weight' matches no parameter or input; near it: up\.weight, down\.weight, \w+\.bias",
    ),
    "axis twice": (
        {"up.weight": ("tp", "tp")},
        r"the plan's 'up\.weight': \('tp', 'tp'\) uses the axis 'tp' twice on up\.weight; an axis splits one dim of a value once",
    ),
    "axis twice on one dim": (
        {"up.weight": (("tp", "dp", "tp"),)},
        r"the plan's 'up\.weight': \(\('tp', 'dp', 'tp'\),\) uses the axis 'tp' twice on up\.weight; .*",
    ),
    "no such dim": (
        {"up.bias": (None, "tp")},
        r"the plan's 'up\.bias': \(None, 'tp'\) splits dim 1, but up\.bias has the shape \[12\] and only 1 dim",
    ),
    "contradiction": (
        {"*.weight": ("tp",), "*.down.weight": (None, "tp")},
        r"the plan contradicts itself on down\.weight: '\*\.weight' says \('tp',\), '\*\.down\.weight' says "
        r"\(None, 'tp'\); make the globs disjoint",
    ),
    "a string": (
        {"up.weight": "tp"},
        r"the plan's 'up\.weight': 'tp' is not a tuple with an axis or None for each dim, as in \(\"tp\", None\)",
    ),
    "a number in it": (
        {"up.weight": (0,)},
        r"the plan's 'up\.weight': \(0,\) has 0 where an axis, a tuple of axes or None belongs",
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans(case: str) -> None:
    plan, text = PLANS[case]
    refuses(PlanError, text, Block(), plan=plan)


def test_a_value_without_dims_cannot_be_split() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    refuses(
        PlanError,
        r"the plan's 'scale': \('tp',\) splits dim 0, but scale has the shape \[\] and only 0 dims; "
        r"a value without dims cannot be split",
        Scaled(),
        plan={"scale": ("tp",)},
    )


def test_globs_that_agree_are_no_contradiction() -> None:
    autopar.parallelize(Block(), Mesh(tp=2), {"*.up.weight": ("tp", None), "up.*": ("tp",)}, example=(x,))


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.sum() > 0:
            return y
        return -y


def test_control_flow_on_values() -> None:
    refuses(
        CaptureError,
        rf"the step depends on the values of its tensors, so it is not one static graph\n"
        rf"    {HERE}:\d+  if y\.sum\(\) > 0:\n"
        rf"  it reads them with aten\._local_scalar_dense\.default \(\.item\(\), bool\(\), nonzero and the like\)\n"
        rf"  keep the choice inside the graph with torch\.where, or move it out of forward",
        Choice(),
    )


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.inner(x))


def test_an_op_without_a_rule_is_refused_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, torch.ops.aten.linalg_inv_ex.default)
    refuses(
        RuleError,
        rf"linalg_inv_ex: no sharding rule for linalg_inv_ex \(rules exist for .*\); if it works element by element, register one in a line:\n"
        rf'    autopar\.register_rule\("\.\.\. -> \.\.\., \.\.\.", "aten::linalg_inv_ex"\)\n'
        rf"    {HERE}:\d+  return torch\.linalg\.inv\(self\.inner\(x\)\)   in module the root",
        Inverse(),
        strict=True,
    )


def test_an_op_without_a_rule_is_computed_whole_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, torch.ops.aten.linalg_inv_ex.default)
    model = Inverse().double()
    given = torch.randn(4, 8, dtype=torch.float64)
    parallel = check_equal(model, Mesh(dp=2, tp=2), {"inner.weight": ("tp", None), "inner.bias": ("tp",)}, (given,))
    (note,) = parallel.reports["place"].notes
    assert re.fullmatch(
        rf"linalg_inv_ex has no sharding rule, and none was found: its result 1 is zero, whatever it is given; each rank computes all of "
        rf"it, on whole operands \(1 times, \d+ bytes gathered, 132 bytes of results\); register_rule one, or refuse it with strict=True\n    {HERE}:\d+  return torch\.linalg\.inv\(self\.inner\(x\)\)   in module the root",
        note,
    )
    assert note in str(parallel.reports)


def test_the_remedy_for_an_op_without_a_rule() -> None:
    """A custom op is refused until one line registers its rule, with its size of result rewritten and all."""
    library = torch.library.Library("autopar_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")

    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.autopar_test.twice(x)

    with torch.no_grad():
        with pytest.raises(RuleError, match=r'autopar.register_rule\("... -> ...", "autopar_test::twice"\)'):
            autopar.parallelize(Custom(), Mesh(dp=2), example=(x,), strict=True)
        autopar.register_rule("... -> ...", "autopar_test::twice", linear="0")
        parallel = autopar.parallelize(Custom(), Mesh(dp=2), example=(x,))
        assert torch.equal(parallel.simulate(x), 2 * x)
        assert "autopar_test::twice(x)" in str(parallel.program)


def test_a_wrong_pattern_and_an_unknown_op() -> None:
    with pytest.raises(ValueError, match=r"rule 'a b': it needs exactly one '->'"):
        autopar.register_rule("a b", "aten::cumsum")
    with pytest.raises(RuleError, match=r"torch has no op 'nowhere::op'; write it as 'add.Tensor' or 'library::op'"):
        autopar.register_rule("... -> ...", "nowhere::op")


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2


def test_writing_into_an_argument() -> None:
    refuses(
        CaptureError,
        rf"the step writes into its argument x, which the caller would see changed\n"
        rf"    {HERE}:\d+  x \+= 1   in module the root\n"
        rf"  write out of place \(x = x \+ 1 instead of x \+= 1\)",
        Writes(),
    )


def test_an_argument_that_cannot_be_flattened() -> None:
    class Takes(Block):
        def forward(self, x: torch.Tensor, extra: object) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    refuses(
        CaptureError,
        r"argument extra is a object, which capture cannot look into; pass tensors, numbers, strings, or containers and "
        r"dataclasses of them",
        Takes(),
        example=(x, object()),
    )


def test_a_result_that_cannot_be_flattened() -> None:
    class Gives(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return {"y": x, "what": {1, 2}}

    refuses(CaptureError, r"the model returns a set, which capture cannot look into; return tensors, numbers or .*", Gives())


def test_wrong_types() -> None:
    refuses(TypeError, r"parallelize takes an autopar\.Mesh, as in autopar\.Mesh\(dp=2, tp=2\), not int", Block(), mesh=4)
    refuses(TypeError, r"example is the arguments of one call: a tuple \(x,\), a dict of keywords, or both "
                       r"\(\(x,\), \{'labels': y\}\), not a Tensor", Block(), example=x)  # fmt: skip
    with pytest.raises(TypeError, match=r"parallelize takes a torch\.nn\.Module, not function"):
        autopar.parallelize(lambda x: x, Mesh(dp=2))  # type: ignore[arg-type]


def test_the_plan_is_checked_before_a_capture() -> None:
    with pytest.raises(PlanError, match="no axis 'tq'"):
        autopar.parallelize(Block(), Mesh(tp=2), {"up.weight": ("tq",)})


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "60", None])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(ValueError, match="is not a number of seconds above 0"):
        autopar.parallelize(Block(), Mesh(dp=2), timeout=timeout)


@pytest.mark.parametrize("switch", ["strict", "recapture"])
def test_a_switch_that_is_none(switch: str) -> None:
    with pytest.raises(TypeError, match=f"{switch}='yes' is neither True nor False"):
        autopar.parallelize(Block(), Mesh(dp=2), **{switch: "yes"})  # type: ignore[arg-type]


def test_calling_without_processes() -> None:
    parallel = autopar.parallelize(Block(), Mesh(dp=2), example=(x,))
    with pytest.raises(RuntimeError) as caught:
        parallel(x)
    assert str(caught.value) == (
        "the mesh (dp=2) needs 2 processes, and this one is alone; start them with torchrun --nproc-per-node 2 "
        "and call parallelize in each, or call .simulate(...) to run all ranks in this process"
    )


@pytest.mark.parametrize("what", ["program", "reports"])
def test_looking_before_a_capture(what: str) -> None:
    parallel = autopar.parallelize(Block(), Mesh(dp=2))
    with pytest.raises(RuntimeError) as caught:
        getattr(parallel, what)
    assert str(caught.value) == (
        "nothing has been captured yet; give parallelize an example=(x,), or call .simulate(x) once"
    )
    parallel.simulate(x)
    assert getattr(parallel, what)


def test_a_rank_that_is_not_there() -> None:
    parallel = autopar.parallelize(Block(), Mesh(dp=2), example=(x,))
    with pytest.raises(ValueError, match=r"rank 2 is not on the mesh \(dp=2\), whose ranks are 0 1"):
        parallel.local(2)


class Swallows(Choice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        try:
            return y * y.sum().item()
        except RuntimeError:
            return y


def test_control_flow_that_the_model_caught() -> None:
    with pytest.raises(CaptureError, match=r"test_bad_input\.py:\d+  return y \* y\.sum\(\)\.item\(\)"):
        autopar.parallelize(Swallows(), Mesh(dp=2), example=(x,))


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
    "an attribute": (_keeps, {}, r"forward keeps a tensor in last, which a captured step cannot do\n  return it, or .*"),
    "a list": (_logs, {"log": []}, r"forward keeps a tensor in log, .*\n.*"),
    "a cache": (_caches, {"mask": None}, r"forward keeps a tensor in mask, .*\n.*"),
    "a write": (
        _writes,
        {"c": torch.zeros(1)},
        rf"forward writes into a tensor that is neither a parameter, nor a buffer, nor an argument, nor made in it\n"
        rf"    {HERE}:\d+  self\.c\.add_\(1\)   in module the root\n  make it a buffer of the module, with register_buffer",
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
        same = torch.equal(value, getattr(model, key)) if isinstance(value, torch.Tensor) else value == getattr(model, key)
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
    "weight_norm": (torch.nn.utils.weight_norm, "up.weight", r"use torch\.nn\.utils\.parametrizations\.weight_norm, which computes the same"),
    "spectral_norm": (torch.nn.utils.spectral_norm, "up.weight", r"use torch\.nn\.utils\.parametrizations\.spectral_norm, which computes the same"),
    "prune": (lambda layer: prune.l1_unstructured(layer, "bias", 0.5), "up.bias",
              r"end it with torch\.nn\.utils\.prune\.remove\(module, 'bias'\), or multiply by the mask in a parametrization"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_hooks_that_compute_weights(name: str) -> None:
    register, tensor, remedy = HOOKED[name]
    model = Block()
    register(model.up)
    refuses(
        CaptureError,
        rf"a hook of torch\.nn\.utils\.{name} puts a computed tensor into {re.escape(tensor)} before each forward, which a captured step cannot do\n"
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
    "data parallel": (lambda m: nn.DataParallel(m), r"parallelize takes the model itself, not DataParallel; pass what it wraps, model\.module"),
    "data parallel inside": (
        lambda m: nn.Sequential(nn.DataParallel(m)), r"parallelize takes the model itself, not DataParallel \(model\.0\); pass what it wraps, model\.0\.module"),
    "scripted": (lambda m: torch.jit.trace(m, x, check_trace=False), r"parallelize takes an eager model, not one of torch\.jit; .*"),
    "compiled": (lambda m: torch.compile(m), r"parallelize takes the model before torch\.compile; pass model\._orig_mod"),
    "lazy": (lambda m: nn.LazyLinear(3), r"the parameter weight has no shape yet; run the model once before parallelize"),
}


@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.filterwarnings("ignore")
def test_models_that_are_not_plain(case: str) -> None:
    wrap, text = WRAPPED[case]
    with pytest.raises(TypeError) as caught:
        autopar.parallelize(wrap(Block()), Mesh(dp=2), example=(x,))
    assert re.fullmatch(text, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "instead"),
    [({"pp": 2, "dp": 2}, "dp=4"), ({"dp": 2, "pp": 2, "tp": 2}, "dp=4, tp=2"), ({"pp": 2, "tp": 2}, "dp=2, tp=2"), ({"pp": 4}, "dp=4")],
    ids=str,
)
def test_a_mesh_with_pp(sizes: dict[str, int], instead: str) -> None:
    """It would have every stage compute the whole model; a mesh of one stage is as one without."""
    mesh = Mesh(sizes)
    text = (
        rf"the mesh \({mesh}\) has an axis pp, for the stages of a pipeline, and parallelize does not run pipelines yet: each stage would compute "
        rf"the whole model; give these ranks to another axis, as in Mesh\({instead}\); schedules by themselves are in autopar\.pipeline"
    )
    refuses(ValueError, text, Block(), mesh=mesh)
    refuses(ValueError, text, Block(), mesh=mesh, plan={"up.weight": ("pp", None)})
    assert autopar.parallelize(Block(), Mesh(pp=1, dp=2), example=(x,)).mesh.size == 2


def test_a_stage_is_not_the_mesh() -> None:
    with pytest.raises(ValueError, match=r"parallelize takes the whole mesh; this one is the stage 's0'"):
        autopar.parallelize(Block(), Mesh(dp=2, name="s0"), example=(x,))


def test_tensors_that_are_not_dense() -> None:
    refuses(CaptureError, r"argument x is a sparse_coo tensor, which has no pieces\n  make it dense: to_dense\(\), or sparse=False in an embedding", Block(),
            example=(x.to_sparse(),))  # fmt: skip


def test_simulating_without_data() -> None:
    with torch.device("meta"):
        model, on_meta = Block(), torch.randn(4, 8)
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(on_meta,))
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

    refuses(CaptureError, rf"forward writes into a tensor that is neither .*\n    {HERE}:\d+  holder\[0\]\[0\]\.add_\(1\) .*\n.*", forwards(writes))
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
def test_transforms_are_refused() -> None:
    model = Block().requires_grad_(False)
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(x,))
    with pytest.raises(ValueError, match=r"is inside a torch\.func transform or carries a forward-mode tangent"):
        torch.func.jvp(parallel.simulate, (x,), (x,))
