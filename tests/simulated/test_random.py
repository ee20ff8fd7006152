"""Random ops: the single device's numbers in one mode, streams of their own in the other; refused where neither is
possible."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import loss_of, relative
from shared_captures import shared_captures  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import CaptureError, Mesh, RuleError
from autopar.ir.ops.seeded_random import is_seeded_random, mixed
from autopar.ir.program import Program
from autopar.rules.registry import RULES
from autopar.runtime.simulation.simulate import compile_phases, run_ranks


class Apply(nn.Module):
    """A linear layer on each side of a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 12), nn.Linear(12, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self.up(x)))


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*[x.view(len(x), 1, 3, 4)] * 3, dropout_p=0.3).reshape(x.shape)


def in_place(x: torch.Tensor) -> torch.Tensor:
    noise = torch.empty(12, dtype=x.dtype)
    return (
        x
        + noise.uniform_()
        + torch.empty_like(x).normal_(0.5, 2.0) * noise.bernoulli_(0.5)
        + torch.empty_like(x).exponential_()
    )


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: x + torch.rand(12, dtype=x.dtype),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x * torch.randn(12, dtype=x.dtype) + torch.randn_like(x),
    "randint": lambda x: x + torch.randint(9, (12,)) + torch.randint(3, 7, (12,)) + torch.randint_like(x, 5),
    "normal": lambda x: x + torch.normal(0.0, 1.0, (12,), dtype=x.dtype) + torch.normal(x.detach(), 2.0),
    "in place": in_place,
    "randperm": lambda x: x[:, torch.randperm(12)],
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.detach().softmax(1), 12, replacement=True)),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.3),
    "in-place dropout": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x.view(-1, 3, 2, 2), 0.3).reshape(x.shape),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "attention": attention,
    "in memory order": lambda x: (
        F.dropout(x.mT, 0.3).mT
        + torch.randn_like(x.mT).mT
        + F.dropout(x.view(-1, 2, 3, 2).permute(2, 0, 3, 1), 0.3).permute(1, 3, 0, 2).reshape(x.shape)
    ),
    "checkpoint": lambda x: checkpoint(lambda x: F.dropout(torch.tanh(F.dropout(x, 0.3)), 0.3), x, use_reentrant=False),
}
PLAN = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}


def plan_for(mesh: Mesh) -> dict[str, Any]:
    return PLAN if "tp" in mesh.names else {}


@functools.cache
def apply(name: str) -> nn.Module:
    return Apply(RANDOM[name]).double()


TURNED = ("attention", "in memory order", "checkpoint", "in place", "dropout")


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, mesh) for name in RANDOM for mesh in (Mesh(dp=2, tp=2), Mesh(dp=3))),
        *((name, mesh) for name in TURNED for mesh in (Mesh(dp=2), Mesh(tp=2))),
        *(
            pytest.param(name, mesh, marks=pytest.mark.sweep("the axis is there beside the other one"))
            for name in RANDOM
            if name not in TURNED
            for mesh in (Mesh(dp=2), Mesh(tp=2))
        ),
    ],
    ids=str,
)
def test_single_draws_what_a_single_device_draws(name: str, mesh: Mesh) -> None:
    model, x = apply(name), torch.randn(6, 8, dtype=torch.float64)
    model.zero_grad()
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, mesh, plan_for(mesh), random="single")
    for seed in (0, 1):
        torch.manual_seed(seed)
        wanted = eager(x)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        found = parallel.simulate(x)
        assert relative(found, wanted) <= 1e-10
        assert torch.equal(torch.get_rng_state(), state), "afterwards the generator is where a single device's is"
        loss_of(wanted).backward()
        loss_of(found).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) <= 1e-10


def pieces_of(parallel: autopar.Parallel, name: str, *args: torch.Tensor) -> dict[int, torch.Tensor]:
    """What each rank has of a value."""
    compiled = parallel.capture(*args)
    values = compiled.simulated.start([*parallel.parameters(), *args, torch.tensor(7)])
    code = {rank: compile_phases(compiled.local[rank])["forward"] for rank in values}
    with torch.no_grad():
        run_ranks(compiled.program.meshes, code, values)
    return {rank: own[name] for rank, own in values.items()}


def test_pieces_draw_their_own_and_replicas_the_same() -> None:
    """The hidden layer is split over dp and tp, the result over dp alone."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    plan = {"0.weight": ("tp", None), "0.bias": ("tp",), "2.weight": (None, "tp")}
    parallel = autopar.parallelize(model, Mesh(dp=2, cp=2, tp=2), plan)
    x = torch.randn(8, 8)
    first, second = (node.name for node in parallel.capture(x).program.nodes if is_seeded_random(node.target))
    hidden, result = pieces_of(parallel, first, x), pieces_of(parallel, second, x)
    mesh = parallel.mesh
    for values, axes in ((hidden, ("dp", "tp")), (result, ("dp",))):
        for a in mesh.ranks:
            for b in mesh.ranks:
                here, there = mesh.coordinates(a), mesh.coordinates(b)
                same = all(here[axis] == there[axis] for axis in axes)
                assert torch.equal(values[a], values[b]) == same
    joined = torch.cat([hidden[rank].flatten() for rank in (0, 1, 4, 5)])
    assert 0.4 < joined.mean() < 0.6


def test_seeds_make_a_call_again() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    torch.manual_seed(0)
    a, b = parallel.simulate(x), parallel.simulate(x)
    torch.manual_seed(0)
    assert torch.equal(parallel.simulate(x), a)
    assert not torch.equal(a, b)


def test_a_capture_draws_nothing() -> None:
    state = torch.get_rng_state()
    autopar.parallelize(nn.Dropout(0.5), Mesh(dp=2), "ddp", example=(torch.ones(4, 8),))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_recomputed_is_one_stream() -> None:
    parallel = autopar.parallelize(Apply(RANDOM["checkpoint"]), Mesh(dp=2), "ddp", example=(torch.randn(4, 8),))
    streams = [node.kwargs["stream"] for node in parallel.program.nodes if is_seeded_random(node.target)]
    assert sorted(streams) == [0, 0, 1, 1]


def test_dropout_keeps_its_zeros_in_the_backward() -> None:
    x = torch.ones(6, 8, requires_grad=True)
    out = autopar.parallelize(nn.Dropout(0.5), Mesh(dp=2, tp=2), {"input": ("dp", "tp")}).simulate(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert set(out.unique().tolist()) == {0.0, 2.0}


def test_programs_with_streams_print_and_parse() -> None:
    parallel = autopar.parallelize(Apply(RANDOM["dropout"]), Mesh(dp=2, tp=2), PLAN, example=(torch.randn(4, 8),))
    for program in (parallel.program, parallel.local(3)):
        assert Program.parse(str(program)) == program
    assert "fold_in(seed, (dp, tp))" in str(parallel.local(3))


class SeedsBehind(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.3)
        torch.manual_seed(5)
        return x


def test_a_seed_behind_the_last_draw() -> None:
    with pytest.raises(CaptureError, match="forward seeds the generator, which a captured step does not do again"):
        autopar.parallelize(SeedsBehind(), Mesh(dp=2), "ddp", example=(torch.randn(4, 8),))


def test_the_fast_path_of_an_encoder() -> None:
    """It leaves zeros where positions are padded, which no static graph does; without it eager is the same."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).double().eval()
    x, padded = torch.randn(4, 6, 8, dtype=torch.float64), torch.arange(6).expand(4, 6) > 3
    with torch.no_grad():
        with pytest.raises(CaptureError, match=r"a nested tensor is made.*\n.*\n.*set_fastpath_enabled"):
            autopar.parallelize(encoder, Mesh(dp=2)).simulate(x, src_key_padding_mask=padded)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            found = autopar.parallelize(encoder, Mesh(dp=2)).simulate(x, src_key_padding_mask=padded)
            assert relative(found, encoder(x, src_key_padding_mask=padded)) <= 1e-10
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_mixed_seeds_differ() -> None:
    assert len({mixed(seed, number) for seed in range(100) for number in range(100)}) == 10_000


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.3)


REFUSED = {
    "its own "
    "generator": (lambda x: x + torch.rand(12, generator=torch.Generator()),
                  "draws from a generator of the model's own", "draw without generator="),
    "a seed of its "
    "own": (seeded, "draws after forward has seeded the generator, which a captured step does not do again",
            "call torch.manual_seed before forward"),
}  # fmt: skip
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, mode: Any) -> None:
    function, why, what = REFUSED[name]
    with mode(), pytest.raises(CaptureError) as caught:
        autopar.parallelize(Apply(function), Mesh(dp=2), "ddp", example=(torch.randn(4, 8),))
    first, line, remedy = str(caught.value).splitlines()
    assert first.endswith(why)
    assert "test_random.py:" in line and line.endswith("in module the root")
    assert what in remedy


def test_rrelu() -> None:
    """Its slopes are drawn for what is negative alone, so its numbers are its own in both modes."""
    x = torch.randn(6, 8, dtype=torch.float64)
    parallel = autopar.parallelize(Apply(lambda x: F.rrelu(x, training=True)).double(), Mesh(dp=2, tp=2), PLAN)
    out = parallel.simulate(x)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parallel.parameters())
    with pytest.raises(CaptureError, match="takes a number of random numbers that depends on its values"):
        autopar.parallelize(parallel.module, Mesh(dp=2), random="single").simulate(x)


@torch.library.custom_op("test_random::noise", mutates_args=())
def untold(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("test_random::told", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def told(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


for op in (untold, told):
    op.register_fake(torch.empty_like)


class Noise(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


def test_ops_of_ones_own_that_draw() -> None:
    """One that does not say so would give replicas different values; one that does draws from a stream, whole."""
    x = torch.zeros(4, 8)
    with pytest.raises(
        RuleError,
        match=r"test_random::noise has no sharding rule, and it draws random numbers.*\n.*test_random.py:\d+.*\n  tag "
        r"it: ",
    ):
        autopar.parallelize(Noise(untold), Mesh(dp=2), "ddp", example=(x,))
    for random in ("parallel", "single"):
        parallel = autopar.parallelize(Noise(told), Mesh(dp=2), random=random)
        torch.manual_seed(0)
        found = parallel.simulate(x)
        torch.manual_seed(0)
        assert torch.equal(parallel.simulate(x), found) and found.unique().numel() > 16
    torch.manual_seed(0)
    assert torch.equal(told(x), found)


def test_a_rule_of_an_op_that_draws() -> None:
    """It is registered by the name that the op has; with it the op comes apart, but not where a single device's numbers
    are wanted."""
    x, mesh, plan = torch.zeros(4, 8), Mesh(dp=2), {"x": ("dp",)}
    with pytest.raises(
        RuleError,
        match=r'no sharding rule for test_random::told.*\n +autopar.register_rule\("... -> ...", "test_random::told"\)',
    ):
        autopar.parallelize(Noise(told), mesh, plan, strict=True, example=(x,))
    before = dict(RULES)
    try:
        autopar.register_rule("... -> ...", told)
        parallel = autopar.parallelize(Noise(told), mesh, plan, strict=True, example=(x,))
        assert "f32[4/dp 8] = drawn::test_random__told(x, seed=seed" in str(parallel.program)
        noise = parallel.simulate(x)
        assert not torch.equal(noise[:2], noise[2:])
        single = autopar.parallelize(Noise(told), mesh, plan, strict=True, random="single")
        torch.manual_seed(0)
        found = single.simulate(x)
        torch.manual_seed(0)
        assert torch.equal(told(x), found)
    finally:
        RULES.clear()
        RULES.update(before)


def test_numbers_that_cannot_be_told() -> None:
    model = Apply(lambda x: torch.poisson(x.detach().exp()))
    autopar.parallelize(model, Mesh(dp=2), "ddp", example=(torch.randn(4, 8),))
    with pytest.raises(
        CaptureError, match=r"takes a number of random numbers that depends on its values, .*\n.*test_random.py:\d+"
    ):
        autopar.parallelize(model, Mesh(dp=2), "ddp", example=(torch.randn(4, 8),), random="single")


@pytest.mark.parametrize("mode", MODES)
def test_random_in_every_mode(mode: Any) -> None:
    """Under inference_mode composite ops come whole."""
    x = torch.randn(4, 8)
    with mode():
        out = autopar.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), Mesh(dp=2)).simulate(x)
        assert 0 < (out == 0).sum() < out.numel()


@pytest.mark.parametrize("mode", MODES)
def test_dropout_that_is_off(mode: Any) -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.RReLU().eval(), nn.AlphaDropout(0.5).eval())
    x = torch.randn(4, 8)
    with mode():
        parallel = autopar.parallelize(model, Mesh(dp=2))
        assert torch.equal(parallel.simulate(x), model(x))
    assert "seed" not in str(parallel.program)


def test_an_unknown_choice() -> None:
    with pytest.raises(ValueError, match="random='same' is none of 'parallel', 'single'"):
        autopar.parallelize(nn.Dropout(), Mesh(dp=2), random="same")
