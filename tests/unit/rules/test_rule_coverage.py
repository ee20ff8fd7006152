"""What the tables cover: every core op of ATen; how long they are; the page made from them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from autopar import rules
from autopar.capture.decompose.table import DECOMPOSITIONS
from autopar.report.rules import COMMAND, page
from autopar.rules import RULES
from autopar.torch_private import LACKING, OpOverload, is_seeded, mutates

FOLDER = Path(rules.__file__).parent
MACHINERY = {
    "__init__",
    "notation",
    "unknown",
    "registry",
    "work",
    "binding",
    "drawn",
    "strategies",
    "dims",
    "regroup",
    "forms",
    "indexing",
    "by_schema",
}

# core ops of which no program has a node, and why
REFUSED = {
    "nonzero": "its result's shape depends on values: capture refuses it",
    "_local_scalar_dense": "a number from a tensor (.item()): capture refuses it",
    "sym_is_contiguous": "a truth, no tensor",
    "sym_numel": "a number, no tensor",
    "sym_size.int": "a number, no tensor",
    "sym_storage_offset": "a number, no tensor",
    "sym_stride.int": "a number, no tensor",
}


def core() -> list[OpOverload]:
    """Every overload that torch tags as core."""
    names = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
    }
    # dir() has only those that were called before
    packets = (getattr(torch.ops.aten, name, None) for name in sorted(names))
    found = [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]
    return [op for op in found if torch.Tag.core in op.tags]


def test_every_core_op_has_a_rule_or_is_taken_apart() -> None:
    ops = core()
    assert len(ops) > 180
    left = set()
    for op in ops:
        written = mutates(op)  # capture puts atan2 in the place of atan2.out
        # torch takes it apart before it is traced
        made_of_others = op._can_decompose() and not op.name().startswith("aten::sym_")
        drawn = is_seeded(op)  # test_random
        if not (op in RULES or op in DECOMPOSITIONS or drawn or written or made_of_others):
            left.add(op.name().removeprefix("aten::"))
    assert left == REFUSED.keys()


def test_tables_are_short_and_cover_much() -> None:
    """One line an op: what builds patterns is elsewhere."""
    tables = [path for path in FOLDER.glob("*.py") if path.stem not in MACHINERY]
    assert sum(len(path.read_text().splitlines()) for path in tables) <= 600
    assert sum(op.namespace == "aten" for op in RULES) >= 500


def test_the_page_is_what_the_tables_say() -> None:
    """The page has the ops of torch 2.13. Without those that this torch lacks, it is what the tables say."""
    recorded = (FOLDER / "TABLE.md").read_text()
    lacking = [name.removeprefix("aten::") for name in LACKING if f"`{name.removeprefix('aten::')}`" in recorded]
    for name in lacking:
        recorded = recorded.replace(f"`{name}`, ", "")
    count = int(re.search(r"^(\d+) overloads", recorded, re.MULTILINE)[1])
    assert recorded.replace(f"{count} overloads", f"{count - len(lacking)} overloads") == page(), f"renew it: {COMMAND}"


def test_making_the_page_leaves_the_tables_alone() -> None:
    before = dict(RULES)
    page()
    assert list(RULES.items()) == list(before.items())
    assert all(RULES[op] is rule for op, rule in before.items())
