"""Durations: by a machine they are the prices that a search adds up, by a profile its times; and start-up costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled import TEXT, profile, program

from autopar.costs.durations import durations
from autopar.costs.machine import Measured, known, machine
from autopar.costs.prices import FORMS, price, startup
from autopar.costs.profile import Profile
from autopar.costs.program_price import node_prices
from autopar.errors import ProfileError

CPU = machine("cpu")
FITTED = replace(CPU, measured=(Measured("all_reduce", 4, 80e-6, 20e-6, 1e9, 1e4),))
MACHINES = [*dict.fromkeys(known().values()), FITTED]
SUMS = """\
program explicit on dp=2
  w_grad : f32[64 64] +dp = state(w_grad_sum, 'w.grad')
  b_grad : f32[64] +dp = state(b_grad_sum, 'b.grad')
  x : f32[8/dp 64] = input
backward:
  t : f32[64 8/dp] = t(x)
  mm : f32[64 64] +dp = mm(t, x)
  w_grad_sum : f32[64 64] +dp = add.Tensor(w_grad, mm)
  sum_1 : f32[64] +dp = sum.dim_IntList(x, [0])
  twice : f32[64] +dp = add.Tensor(b_grad, b_grad)
  b_grad_sum : f32[64] +dp = add.Tensor(sum_1, twice)
  return ()
"""


# -- by a machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [CPU, FITTED, machine("NVIDIA H100 80GB HBM3")], ids=lambda one: one.name)
def test_by_a_machine_they_are_the_prices_of_the_program(on: object) -> None:
    one = program()
    found = durations(one, on)  # type: ignore[arg-type]
    assert {name: round(seconds * 1e9) for name, seconds in found.seconds.items()} == {
        node.name: cost
        for node, cost in node_prices(one, on)  # type: ignore[arg-type]
    }
    assert found.launch == on.memory.latency and found.interference == 0.0  # type: ignore[attr-defined]
    assert found.source == f"the figures of {on.name}"  # type: ignore[attr-defined]


def test_a_machine_by_name_and_by_file(tmp_path: Path) -> None:
    FITTED.save(tmp_path / "machine.json")
    assert durations(program(), "cpu") == durations(program(), CPU)
    assert durations(program(), tmp_path / "machine.json") == durations(program(), FITTED)
    with pytest.raises(ValueError, match="there is no machine 'cpus'; did you mean 'cpu'"):
        durations(program(), "cpus")
    with pytest.raises(TypeError, match="3 is no machine"):
        durations(program(), 3)  # type: ignore[arg-type]


def test_the_interference_of_a_machine_is_kept(tmp_path: Path) -> None:
    slowed = replace(CPU, interference=0.5)
    slowed.save(tmp_path / "machine.json")
    assert durations(program(), tmp_path / "machine.json").interference == 0.5


def test_a_program_that_is_not_explicit_is_refused() -> None:
    traced = program("program traced\n  x : f32[8 64] = input\n  relu : f32[8 64] = relu(x)\n  return relu\n")
    with pytest.raises(ValueError, match="only explicit programs have a price, and this one is traced"):
        durations(traced, CPU)


def test_elements_of_results_take_no_time() -> None:
    text = TEXT.replace("  relu : f32[8/dp 64] = relu(mm_1_tp)\n", "  split : (f32[8/dp 32], f32[8/dp 32]) = "
                        "split_with_sizes(mm_1_tp, [32, 32], 1)\n  piece : f32[8/dp 32] = split[0]\n"
                        "  relu : f32[8/dp 64] = relu(mm_1_tp)\n")  # fmt: skip
    found = durations(program(text), CPU)
    assert found.seconds["piece"] == found.startup["piece"] == 0.0


# -- start-up costs ----------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([name for name in FORMS if name not in ("cast", "wait", "fold_in", "slice", "pend")]),
    st.integers(2, 300), st.integers(0, 10**9), st.sampled_from(MACHINES),
)  # fmt: skip
def test_a_startup_is_the_price_of_nothing_and_below_all_prices(name: str, ranks: int, size: int, on: object) -> None:
    theta = startup(name, ranks, on)  # type: ignore[arg-type]
    assert 0 < theta <= price(name, size, ranks, on)  # type: ignore[arg-type]
    assert theta == price(name, 0, ranks, on)  # type: ignore[arg-type]
    assert theta <= startup(name, 2 * ranks, on) or on.ranks_per_node > 1  # type: ignore[arg-type, attr-defined]


def test_the_startup_of_a_ring_is_its_messages() -> None:
    one = replace(CPU, inside=replace(CPU.inside, latency=1e-4))
    assert startup("all_gather", 2, one) == pytest.approx(1e-4)
    assert startup("all_reduce", 2, one) == pytest.approx(1e-4), "by doubling: one message"
    assert startup("redistribute", 4, one) == pytest.approx(3e-4)


def test_only_exchanges_have_a_startup() -> None:
    found = durations(program(), CPU)
    assert {name for name, seconds in found.startup.items() if seconds} == {"mm_1_tp", "sum_1_dp"}
    assert found.startup["mm_1_tp"] == pytest.approx(startup("all_reduce", 2, CPU))
    assert all(found.startup[name] <= found.seconds[name] for name in found.startup)
    assert found.startup.keys() == found.seconds.keys()


@pytest.mark.parametrize("size", [64, 64_000])
def test_a_startup_does_not_depend_on_the_size(size: int) -> None:
    found = durations(program(TEXT.replace("64", str(size))), CPU)
    assert found.startup["mm_1_tp"] == pytest.approx(startup("all_reduce", 2, CPU))


def test_a_redistribute_has_the_startup_of_its_messages() -> None:
    text = """\
program explicit on dp=2 tp=2
  x : f32[8/dp 64/tp] = input
  x_dp_tp : f32[8/tp 64/dp] = redistribute(x, [(tp,), (dp,)])
  return x_dp_tp
"""
    found = durations(program(text), CPU)
    assert 0 < found.startup["x_dp_tp"] < found.seconds["x_dp_tp"]


# -- by a profile ------------------------------------------------------------------------------------------------------


def test_by_a_profile_they_are_its_times(tmp_path: Path) -> None:
    one = profile()
    one.save(tmp_path / "step.json")
    found = durations(program(), one)
    assert found.seconds == one.durations(program())
    assert found.startup == {name: 150e-6 if name in ("mm_1_tp", "sum_1_dp") else 0.0 for name in found.seconds}
    assert (found.launch, found.interference) == (2e-6, 0.25)
    read = durations(program(), str(tmp_path / "step.json"))
    assert read.seconds == found.seconds and read.digest == found.digest
    assert read.source.startswith(f"the profile {tmp_path / 'step.json'}, measured on cpu, 4 gloo processes")


def test_a_profile_of_another_program_is_refused() -> None:
    other = program(TEXT.replace("tp=2", "tp=4"))
    with pytest.raises(ProfileError, match=r"was made of another program.*; make one of this step with"):
        durations(other, profile())
    renamed = program(TEXT.replace("relu", "other").replace("other(", "relu("))
    with pytest.raises(ProfileError, match="was made of another program"):
        durations(renamed, profile())
    assert durations(renamed, profile(), strict=False).seconds["other"] > 0


def test_a_damaged_profile_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text('{"version": 1, "rows": []}')
    with pytest.raises(ProfileError, match="device: missing"):
        durations(program(), tmp_path / "step.json")


def test_all_ranks_have_the_same_durations(tmp_path: Path) -> None:
    """Another process that reads the file finds the same figures."""
    profile().save(tmp_path / "step.json")
    first, second = (durations(program(), Profile.load(tmp_path / "step.json")) for _ in range(2))
    assert first == second and first.digest == second.digest
    changed = profile(launch=3e-6)
    assert durations(program(), changed).digest != first.digest


# -- what is not run, and what runs together ---------------------------------------------------------------------------


def test_the_first_gradient_takes_no_time_to_add() -> None:
    found = durations(program(SUMS), CPU, zeros=["w.grad", "b.grad"])
    all_added = durations(program(SUMS), CPU)
    assert found.seconds["w_grad_sum"] == 0.0 < all_added.seconds["w_grad_sum"]
    for name in ("twice", "b_grad_sum"):  # the sum is read twice, or is not what is added to
        assert found.seconds[name] == all_added.seconds[name] > 0
    by_profile = durations(program(SUMS), profile(SUMS, mesh="dp=2"), zeros=["w.grad"])
    assert by_profile.seconds["w_grad_sum"] == 0.0 < by_profile.seconds["b_grad_sum"]


def test_one_kernel_of_several_updates_is_launched_once() -> None:
    found = durations(program(), profile())
    names = ["mm", "mm_1", "relu"]
    assert found.together(names) == pytest.approx(sum(found.seconds[name] for name in names) - 2 * found.launch)
    assert found.together(["mm"]) == pytest.approx(found.seconds["mm"]) and found.together([]) == 0.0
    slow = durations(program(), profile(launch=1.0))
    assert slow.together(names) == 1.0, "no op does less than nothing beside its launch"
