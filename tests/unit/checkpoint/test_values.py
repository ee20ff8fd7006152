"""Values of a state come back as they were, or are refused by name."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import same
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar import checkpoint
from autopar.checkpoint import values

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.binary(max_size=4),
    st.sampled_from(["$tensor", "$", "a/b", "~1", "", "0"]),
    st.integers(0, 3).map(lambda n: torch.arange(n)),
)  # fmt: skip
KEYS = st.one_of(
    st.integers(-2, 2), st.sampled_from(["$tensor", "$items", "a/b", "a~1b", "a", "b", "", "0"]), st.text(max_size=3)
)


def keys_apart(state: dict[Any, Any]) -> bool:
    return len({str(key) for key in state}) == len(state)


TREES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
                                     st.dictionaries(KEYS, inner, max_size=3).filter(keys_apart))
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=4).filter(keys_apart))
@example({0: [torch.arange(1)], "": [[torch.arange(2)]]})  # an empty key has a name of its own
def test_values_come_back_as_they_were(state: dict[Any, Any]) -> None:
    tensors, tree = values.encode_state(state)
    same(values.decode_state(json.loads(json.dumps(tree, allow_nan=False)), tensors), state)
    assert set(tensors) <= set(values.names(tree))


def test_generators_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "torch": torch.get_rng_state(), "numpy": np.random.get_state(),
        "new": np.random.default_rng(7).bit_generator.state, "python": random.getstate(), "lr": np.float64(0.1),
        "size": torch.Size((2, 3)), "nan": float("nan"), "count": np.int64(3),
    }  # fmt: skip
    checkpoint.save(tmp_path, state)
    again = checkpoint.load(tmp_path, dict(state, torch=torch.zeros_like(state["torch"])))
    assert (
        torch.equal(again["torch"], state["torch"])
        and again["python"] == state["python"]
        and again["new"] == state["new"]
    )
    assert math.isnan(again["nan"]) and (again["lr"], again["size"], again["count"]) == (0.1, (2, 3), 3)
    np.testing.assert_equal(again["numpy"], state["numpy"])
    np.random.set_state(again["numpy"])


class Layer(torch.nn.Linear):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "a "
    "module": ({"model": Layer(2, 2)},
               "TypeError: model is a Layer, which a checkpoint cannot keep as data; pass its state_dict()"),
    "a "
    "dtype": ({"a": {"b": torch.float32}},
              "TypeError: a/b is a dtype, which a checkpoint cannot keep as data; save tensors, numbers, texts, "
              "bytes, lists, tuples, dicts and None"),
    "a key": ({"a": {1.5: 2}}, "TypeError: a has the key 1.5; a checkpoint keeps keys that are texts or whole numbers"),
    "objects": ({"a": np.array([object()])},
                "TypeError: a is an ndarray, which a checkpoint cannot keep as data; save tensors"),
    "one "
    "name": ({"a": {0: torch.ones(1), "0": torch.ones(1)}},
             "ValueError: two tensors of the state are called a/0; give them other keys"),
    "no "
    "dict": ([torch.ones(1)],
             'TypeError: the state is a list; pass a dict, such as {"model": model.state_dict(), "step": 7}'),
    "meta": ({"w": torch.empty(2, device="meta")},
             "ValueError: w is on the meta device and has no values; to_empty() and init it"),
    "sparse": ({"w": torch.eye(2).to_sparse()},
               "TypeError: w is sparse_coo, which a checkpoint cannot keep; it keeps dense tensors of float64, "
               "float32"),
    "complex": ({"w": torch.zeros(2, dtype=torch.complex128)},
                "TypeError: w is complex128 [2], which a checkpoint cannot keep; it keeps dense tensors of float64"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_is_refused(tmp_path: Path, case: str) -> None:
    state, message = REFUSED[case]
    how, text = checkpoints.told(lambda: checkpoint.save(tmp_path / "new", state))
    assert f"{how}: {text}".startswith(message)
    assert not (tmp_path / "new").exists()
