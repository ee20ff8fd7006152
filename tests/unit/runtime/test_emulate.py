"""What ``autopar.emulate`` refuses, and what it switches on and off."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from torch import distributed

import autopar
from autopar.runtime.wire.emulate import present
from autopar.runtime.wire.wire_groups import BACKEND, completes_in_order


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    yield
    if (wire := present()) is not None:
        wire.close()


@pytest.mark.parametrize(("given", "text"), [
    ({"latency": -1e-6}, "latency is a number of seconds, ≥ 0, not -1e-06"),
    ({"latency": math.inf}, "latency is a number of seconds, ≥ 0, not inf"),
    ({"latency": "1us"}, "latency is a number of seconds, ≥ 0, not '1us'"),
    ({"latency": True}, "latency is a number of seconds, ≥ 0, not True"),
    ({"bandwidth": 0}, "bandwidth is a number of bytes a second, > 0, not 0"),
    ({"bandwidth": math.nan}, "bandwidth is a number of bytes a second, > 0, not nan"),
    ({"links": "ranks"}, "links is one of 'rank', 'axis', not 'ranks'; did you mean 'rank'?"),
    ({"links": 3}, "links is one of 'rank', 'axis', not 3"),
    ({"ranks_per_host": 4}, "between is (latency, bandwidth) of a rank's link to other hosts, not None; with it, "
                            "ranks_per_host says which ranks share a host"),
    ({"ranks_per_host": 4, "between": 1e9}, "between is (latency, bandwidth) of a rank's link to other hosts, not "
                                            "1000000000.0; with it, ranks_per_host says which ranks share a host"),
    ({"between": (0.0, 1e9)}, "ranks_per_host is the number of ranks of an emulated host, ≥ 1, not None; with it, "
                              "between=(latency, bandwidth) are the links between hosts"),
    ({"ranks_per_host": 2.0, "between": (0.0, 1e9)}, "ranks_per_host is the number of ranks of an emulated host, ≥ 1, "
                                                     "not 2.0; with it, between=(latency, bandwidth) are the links "
                                                     "between hosts"),
    ({"ranks_per_host": 4, "between": (-1.0, 1e9)}, "latency between hosts is a number of seconds, ≥ 0, not -1.0"),
    ({"ranks_per_host": 4, "between": (0.0, 0)}, "bandwidth between hosts is a number of bytes a second, > 0, not 0"),
    ({"pace": {"F": -1.0}}, "pace: the duration of 'F' is a number of seconds ≥ 0, not -1.0"),
])  # fmt: skip
def test_bad_input_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        autopar.emulate(**({"latency": 1e-5, "bandwidth": 1e9} | given))
    assert str(error.value) == text
    assert present() is None


def test_groups_that_exist_are_refused() -> None:
    store = tempfile.mktemp(prefix="autopar-test-")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        with pytest.raises(
            RuntimeError, match=r"emulation after groups exist: .*call autopar.emulate before init_proc"
        ):
            autopar.emulate(1e-5, 1e9)
        assert present() is None
    finally:
        distributed.destroy_process_group()


def test_a_backend_without_a_wire_is_refused() -> None:
    autopar.emulate(1e-5, 1e9).close()
    assert distributed.Backend.default_device_backend_map["cpu"] == "gloo"
    store = tempfile.mktemp(prefix="autopar-test-")
    with pytest.raises(RuntimeError, match=r"needs a wire; call autopar.emulate first"):
        distributed.init_process_group(BACKEND, init_method=f"file://{store}", rank=0, world_size=1)


def test_the_last_wire_counts() -> None:
    first, second = autopar.emulate(1e-5, 1e9), autopar.emulate(2e-5, 1e9, "axis")
    assert present() is second
    assert second.settings == {"latency": 2e-5, "bandwidth": 1e9, "links": "axis"}
    first.close()  # it is not on any more
    assert present() is second
    assert distributed.Backend.default_device_backend_map["cpu"] == BACKEND


def test_one_rank_is_on_the_wire() -> None:
    import torch

    wire = autopar.emulate(1e-3, 1e9)
    store = tempfile.mktemp(prefix="autopar-test-")
    distributed.init_process_group(init_method=f"file://{store}", rank=0, world_size=1)
    try:
        x = torch.ones(3)
        distributed.all_reduce(x)
        assert x.tolist() == [1.0] * 3
        assert [one.name for one in wire.records] == ["allreduce"]
        assert wire.report().charged == 0.0
        group = distributed.group.WORLD
        assert group is not None
        assert completes_in_order(group.group_name, "undefined")
    finally:
        distributed.destroy_process_group()


def test_which_backends_complete_in_order() -> None:
    assert [completes_in_order("?", name) for name in (BACKEND, "nccl", "gloo", "mine")] == [True, True, False, False]
