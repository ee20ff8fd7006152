"""Machines: the file of known ones, files of one's own and what is wrong with bad ones, and which device is which."""

from __future__ import annotations

import argparse
import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autopar.costs import calibrate
from autopar.costs.machine import (
    MEASURABLE,
    NARROW_OPERATIONS,
    WIDE_OPERATIONS,
    Link,
    Machine,
    Measured,
    known,
    machine,
    machine_from,
    machine_of,
)
from autopar.ir.record import DTYPES

ALL = tuple(dict.fromkeys(known().values()))

MINE = Machine(
    "my server", "cpu", 4, Link(1e-4, 2e9), Link(2e-4, 1e9), Link(0.0, 1e10), peak=(("f64", 5e10), ("f32", 1e11)),
    measured=(Measured("all_reduce", 2, 1e-4, 5e-5, 1e9, 4096.0), Measured("send", 2, 0.0, 0.0, 1e9, 0.0)),
    aliases=("cpu",), source="a test", note="not real", capacity=1.6e10,
)  # fmt: skip

# as torch.cuda.get_device_name prints them
DEVICES = """
Tesla V100-SXM2-16GB | Tesla V100-SXM2-32GB | Tesla V100-PCIE-16GB | Tesla V100-PCIE-32GB | Tesla T4
NVIDIA A100-SXM4-40GB | A100-SXM4-40GB | NVIDIA A100-SXM4-80GB | NVIDIA A100-PCIE-40GB | NVIDIA A100-PCIe-40GB | NVIDIA A100 80GB PCIe
NVIDIA H100 80GB HBM3 | NVIDIA H100 PCIe | NVIDIA H100 NVL | NVIDIA H200 | NVIDIA B200 | NVIDIA L4 | NVIDIA L40S | NVIDIA A10G
NVIDIA GeForce RTX 4090 | AMD Instinct MI250X | AMD Instinct MI300X
"""  # noqa: E501
NAMES = [name.strip() for line in DEVICES.strip().splitlines() for name in line.split("|")]


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_is_found_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine(name).kind == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name if device.index == 1 else "another")
    found = machine_of(torch.device("cuda", 1))
    assert found is machine_of("cuda:1") is machine_of(name) is machine(name)
    assert name in (found.name, *found.aliases)
    for family in ("V100", "T4", "A100", "H100", "H200", "B200", "L40S", "A10G", "4090", "MI250X", "MI300X"):
        assert (family in name) == (family in found.name)
    for form in ("PCI", "SXM", "40GB", "NVL"):
        assert (form in name.upper()) == (form in found.name.upper())


def test_every_alias_is_a_machine_of_its_own() -> None:
    names = [name for one in ALL for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names)) == len(known())
    assert all(machine(name) is one for one in ALL for name in (one.name, *one.aliases))


@pytest.mark.parametrize("one", ALL, ids=[one.name for one in ALL])
def test_the_figures_of_a_machine_are_of_its_kind(one: Machine) -> None:
    assert one.source
    assert one.inside.latency < one.outside.latency and one.inside.bandwidth > one.outside.bandwidth
    assert one.memory.bandwidth > one.inside.bandwidth
    peaks = dict(one.peak)
    assert set(peaks) <= set(DTYPES) and not one.measured
    rates = [peaks[dtype] for dtype in ("f64", "f32", "f16", "f8e4m3") if dtype in peaks]
    assert rates == sorted(rates)
    assert (one.capacity is None) == (one.kind != "cuda")
    named = [float(found) * 1e9 for name in (one.name, *one.aliases) for found in re.findall(r"(\d+)GB", name)]
    assert set(named) <= {one.capacity}
    if one.kind == "cuda":
        assert one.capacity is not None and 1.6e10 <= one.capacity < 2e11
        assert 1e9 < one.outside.bandwidth < 1e12 and 8e12 < peaks["f32"] < 2e14 and peaks["f16"] >= 6e13


def test_no_machine_of_that_name() -> None:
    with pytest.raises(
        ValueError, match=re.escape("there is no machine 'NVIDIA H100 PCI'; did you mean 'NVIDIA H100 PCIe'?")
    ):
        machine("NVIDIA H100 PCI")
    with pytest.raises(
        ValueError, match=re.escape("there is no machine 'abacus'; there are generic, cpu, Tesla V100-SXM2-16GB, ")
    ):
        machine("abacus")


# -- operations a second -----------------------------------------------------------------------------------------------

RATES = replace(MINE, peak=(("f64", 1e9), ("f32", 3e9), ("f16", 8e9), ("bf16", 7e9)))


@pytest.mark.parametrize(
    ("dtype", "rate", "stand_in"),
    [
        (torch.float64, 1e9, "f64"),
        (torch.float32, 3e9, "f32"),
        (torch.float16, 8e9, "f16"),
        (torch.bfloat16, 7e9, "bf16"),
        (torch.float8_e4m3fn, 7e9, "bf16"),  # the next larger size, the slower of two
        (torch.float8_e4m3fnuz, 7e9, "bf16"),  # it has no short name
        (torch.complex64, 0.75e9, "f32"),  # four real products
        (torch.complex128, 0.25e9, "f64"),
        (torch.int64, 1e9, "f64"),  # the slowest
        (torch.bool, 1e9, "f64"),
    ],
)
def test_a_dtype_that_is_not_listed_has_the_rate_of_another(dtype: torch.dtype, rate: float, stand_in: str) -> None:
    assert RATES.flops(dtype) == rate
    assert RATES.stand_in(dtype) == stand_in


def test_the_rates_of_machines_that_list_little() -> None:
    one = replace(MINE, peak=(("f32", 3e9), ("f16", 8e9)))
    assert (one.stand_in(torch.bfloat16), one.flops(torch.bfloat16)) == ("f16", 8e9)
    assert (one.stand_in(torch.float64), one.flops(torch.float64)) == ("f32", 3e9)  # wider than all: the slowest
    none = replace(MINE, peak=())
    assert none.stand_in(torch.float32) == none.stand_in(torch.complex64) == ""
    assert none.flops(torch.float32) == none.flops(torch.int64) == 1e10 * WIDE_OPERATIONS
    assert none.flops(torch.bfloat16) == none.flops(torch.float8_e5m2) == 1e10 * NARROW_OPERATIONS
    assert none.flops(torch.complex64) == 1e10 * WIDE_OPERATIONS / 4
    integers = replace(MINE, peak=(("i8", 5e9),))
    assert (integers.stand_in(torch.float32), integers.flops(torch.float32)) == ("i8", 5e9)


def test_a_machine_is_given_by_itself_its_name_or_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MINE.save("mine.json")
    MINE.save("mine")
    MINE.save("cpu")
    assert machine_from(MINE) is MINE
    assert machine_from("mine.json") == machine_from("mine") == machine_from(Path("cpu")) == MINE
    assert machine_from("cpu") is machine_from("gloo") is machine("cpu")  # names come first
    with pytest.raises(ValueError, match="there is no machine 'H100-PCI'; did you mean 'H100-PCIe'"):
        machine_from("H100-PCI")
    with pytest.raises(FileNotFoundError):
        machine_from("hers.json")
    with pytest.raises(TypeError, match="8 is no machine; give a Machine, a name, or the path of a machine file"):
        machine_from(8)


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA A100",
        "NVIDIA A100-SXM4-160GB",
        "TPU v9",
        "cuda:99",
        "cuda:128",
        "cuda:255",
        "meta",
        "mps",
        "",
        torch.device("meta"),
    ],
)
def test_an_unknown_device_is_generic_and_named(device: torch.device | str) -> None:
    found = machine_of(device)
    assert found.name == "generic" and found.kind == "any"
    assert found.note == (
        f"unknown device {str(device)!r}: generic figures, which rank transfers but do not time them; "
        f"measure it with autopar calibrate"
    )
    assert replace(found, note=machine("generic").note) == machine("generic")


def test_a_gpu_that_is_in_no_file_is_generic_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM9")
    assert machine_of("cuda").name == "generic"
    assert machine_of("cuda").note.startswith("unknown device 'NVIDIA A100-SXM9': generic")
    mine = replace(MINE, name="NVIDIA A100-SXM9", aliases=())
    assert machine_of("cuda", also=[mine]) is mine


def test_a_cpu_is_a_cpu() -> None:
    assert machine_of("cpu") is machine_of(torch.device("cpu")) is machine_of("cpu:0") is machine("cpu")
    assert machine("cpu").kind == "cpu"
    assert machine_of("cpu", also=[MINE]) is machine_of("my server", also=[MINE]) is MINE


# -- files -------------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    bare = replace(MINE, peak=(), measured=(), aliases=(), note="", capacity=None)
    for k, one in enumerate((MINE, bare, *ALL)):
        one.save(tmp_path / f"{k}.json")
        assert Machine.load(tmp_path / f"{k}.json") == one


def test_what_has_a_default_may_be_left_out(tmp_path: Path) -> None:
    MINE.save(tmp_path / "all.json")
    content = json.loads((tmp_path / "all.json").read_text())
    for name in ("peak", "measured", "aliases", "note", "capacity"):
        del content["machines"][0][name]
    (tmp_path / "some.json").write_text(json.dumps(content))
    bare = replace(MINE, peak=(), measured=(), aliases=(), note="", capacity=None)
    assert Machine.load(tmp_path / "some.json") == bare


BAD: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("version",), 2, "version: 2 is not known; this autopar reads version 1"),
    (("version",), None, "version: missing; this is no machine description"),
    (("version",), True, "version: an integer ≥ 1 is wanted, not True"),
    (("machines",), None, "machines: missing"),
    (("machines",), {}, "machines: a list is wanted, not {}"),
    (("machines",), [], "machines: the file must have one machine, but has 0"),
    (("machines", 0), "cpu", "machines[0]: an object is wanted, not 'cpu'"),
    (("machines", 0, "name"), None, "machines[0].name: missing"),
    (("machines", 0, "name"), 3, "machines[0].name: a string is wanted, not 3"),
    (("machines", 0, "kind"), "tpu", "machines[0].kind: 'tpu' is none of cpu, cuda, any"),
    (("machines", 0, "ranks_per_node"), 0, "machines[0].ranks_per_node: an integer ≥ 1 is wanted, not 0"),
    (("machines", 0, "ranks_per_node"), 8.0, "machines[0].ranks_per_node: an integer ≥ 1 is wanted, not 8.0"),
    (("machines", 0, "inside"), None, "machines[0].inside: missing"),
    (("machines", 0, "outside"), 1e9, "machines[0].outside: an object is wanted, not 1000000000.0"),
    (("machines", 0, "inside", "latency"), -1e-6, "machines[0].inside.latency: a number ≥ 0 is wanted, not -1e-06"),
    (("machines", 0, "inside", "bandwidth"), 0, "machines[0].inside.bandwidth: a number > 0 is wanted, not 0"),
    (
        ("machines", 0, "memory", "bandwidth"),
        "fast",
        "machines[0].memory.bandwidth: a number > 0 is wanted, not 'fast'",
    ),
    (
        ("machines", 0, "memory", "bandwidth"),
        float("nan"),
        "machines[0].memory.bandwidth: a number > 0 is wanted, not nan",
    ),
    (
        ("machines", 0, "memory", "bandwidth"),
        float("inf"),
        "machines[0].memory.bandwidth: a number > 0 is wanted, not inf",
    ),
    (
        ("machines", 0, "memory", "size"),
        1,
        "machines[0].memory.size: there is no such field; there are latency, bandwidth",
    ),
    (
        ("machines", 0, "peak", "f33"),
        1e12,
        f"machines[0].peak.f33: there is no such field; there are {', '.join(DTYPES)}",
    ),
    (("machines", 0, "peak", "f32"), True, "machines[0].peak.f32: a number > 0 is wanted, not True"),
    (
        ("machines", 0, "measured", 1, "operation"),
        "broadcast",
        f"machines[0].measured[1].operation: 'broadcast' is none of {', '.join(MEASURABLE)}",
    ),
    (("machines", 0, "measured", 1, "operation"), "all_reduce", "machines[0].measured: all_reduce is measured twice"),
    (("machines", 0, "measured", 0, "ranks"), 1, "machines[0].measured[0].ranks: an integer ≥ 2 is wanted, not 1"),
    (("machines", 0, "measured", 0, "half"), None, "machines[0].measured[0].half: missing"),
    (("machines", 0, "aliases"), "cpu", "machines[0].aliases: a list is wanted, not 'cpu'"),
    (("machines", 0, "aliases", 0), 1, "machines[0].aliases[0]: a string is wanted, not 1"),
    (("machines", 0, "aliases", 0), "my server", "machines[0]: the name 'my server' is given twice"),
    (("machines", 0, "capacity"), -1.6e10, "machines[0].capacity: a number > 0 is wanted, not -16000000000.0"),
    (("machines", 0, "capacity"), 0, "machines[0].capacity: a number > 0 is wanted, not 0"),
    (("machines", 0, "capacity"), float("nan"), "machines[0].capacity: a number > 0 is wanted, not nan"),
    (("machines", 0, "capacity"), float("inf"), "machines[0].capacity: a number > 0 is wanted, not inf"),
    (("machines", 0, "capacity"), "16GB", "machines[0].capacity: a number > 0 is wanted, not '16GB'"),
    (
        ("machines", 0, "cores"),
        2,
        "machines[0].cores: there is no such field; there are name, kind, ranks_per_node, inside, outside, memory, "
        "peak, measured, aliases, source, note, capacity, interference, start, levels",
    ),
]


@pytest.mark.parametrize(("field", "value", "text"), BAD, ids=[text for *_, text in BAD])
def test_a_malformed_file_is_refused(field: tuple[str | int, ...], value: Any, text: str, tmp_path: Path) -> None:
    """``None`` leaves the field out."""
    path = tmp_path / "mine.json"
    MINE.save(path)
    content = copy.deepcopy(json.loads(path.read_text()))
    at = content
    for key in field[:-1]:
        at = at[key]
    if value is None:
        del at[field[-1]]
    else:
        at[field[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:
        Machine.load(path)
    assert str(caught.value) == f"{path}: {text}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "the file is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "version: missing; this is no machine description"),
    ],
)
def test_a_file_that_is_something_else_is_refused(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        Machine.load(path)
    assert str(caught.value) == f"{path}: {text}"


def test_two_machines_are_not_one(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    MINE.save(path)
    content = json.loads(path.read_text())
    content["machines"] *= 2
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"{path}: machines[1]: the name 'my server' is given twice")):
        Machine.load(path)
    content["machines"][1] = {**content["machines"][1], "name": "hers", "aliases": []}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"{path}: machines: the file must have one machine, but has 2")):
        Machine.load(path)


def test_what_cannot_be_written_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace(MINE, inside=Link(float("inf"), 1.0)).save(tmp_path / "mine.json")
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"inside": Link(float("nan"), 1e9)}, r"inside.latency: a number ≥ 0 is wanted, not nan"),
        ({"memory": Link(1e-6, 10.0)}, r"memory.bandwidth: 10.0 is out of the range of machines, 1000 to 1e+30"),
        ({"outside": Link(1e6, 1e9)}, r"outside.latency: 1000000.0 is out of the range of machines, 0 to 100"),
        ({"peak": (("f32", float("nan")),)}, r"peak.f32: a number > 0 is wanted, not nan"),
        ({"ranks_per_node": 10**30}, f"ranks_per_node: {10**30} is out of the range of machines, 1 to 1,048,576"),
    ],
)
def test_figures_that_no_machine_has(figures: dict[str, object], text: str) -> None:
    one = replace(MINE, **figures)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(f"the machine {MINE.name!r}: machines[0].{text}")):
        machine_from(one)


@pytest.mark.parametrize("content", ["[" * 100_000 + "]" * 100_000, '{"version": ' + "9" * 5000 + "}"])
def test_a_hostile_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"mine\.json: the file is not JSON: "):
        machine_from(path)


def test_names_that_many_machines_contain() -> None:
    with pytest.raises(
        ValueError, match="did you mean 'NVIDIA H100 80GB HBM3', 'NVIDIA H100 PCIe' or 'NVIDIA H100 NVL'"
    ):
        machine("h100")


# -- calibrate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("floor", "fixed", "bandwidth"), [(3e-4, 1e-4, 1e9), (1e-3, 0.0, 5e8), (0.0, 3e-4, 2e9)])
@pytest.mark.parametrize("disturbed", [None, 1, 3])
def test_a_fit_finds_what_made_the_times(floor: float, fixed: float, bandwidth: float, disturbed: int | None) -> None:
    """Nearly so where there is no floor to be seen; and though one small size took eight times as long."""
    n = np.array(calibrate.SIZES)
    true = np.maximum(floor, fixed + n / bandwidth)
    times = [
        (bytes, t * (8 if k == disturbed else 1))
        for k, (bytes, t) in enumerate(zip(n.tolist(), true.tolist(), strict=True))
    ]
    fit = calibrate.fitted("all_gather", 4, times)
    assert (fit.operation, fit.ranks) == ("all_gather", 4)
    assert fit.seconds(n) == pytest.approx(true, rel=1e-2)
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert min(fit.floor, fit.latency, fit.half) >= 0 and fit.latency <= fit.floor


def test_a_fit_does_not_fall_where_times_do() -> None:
    fit = calibrate.fitted("send", 2, [(4, 4e-3), (4096, 3e-3), (1 << 20, 2e-3)])
    assert fit.bandwidth > 0 and fit.half >= 0 and fit.floor > 0
    assert fit.seconds(0) <= fit.seconds(4096) <= fit.seconds(1 << 30)
    assert 2e-3 <= fit.seconds(4096) <= 4e-3


@pytest.mark.processes
def test_calibrate_writes_a_machine(tmp_path: Path) -> None:
    """Of any figures: what is measured is what runs here, now."""
    parser = argparse.ArgumentParser()
    calibrate.arguments(parser)
    path = tmp_path / "mine.json"
    printed = calibrate.run(
        parser.parse_args(["--rounds", "2", "--sizes", "4", "4096", "1048576", "--write", str(path)])
    )
    one = Machine.load(path)
    assert machine_of("cpu", also=[one]) is one and one.note == "outside is not measured"
    assert tuple(fit.operation for fit in one.measured) == MEASURABLE and {fit.ranks for fit in one.measured} == {2}
    for text in (*MEASURABLE, "1,048,576", "GB/s", "GFLOP/s, one thread"):
        assert text in printed
