"""What a torch lacks is a skipped line of a table, and nothing else."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.errors import RuleError
from autopar.rules.registry import overload
from autopar.torch_private import LackingOp, aten, op_named, packets, present

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# what the tables ask for and a version does not have. A name that is misspelt in a table is found here
LACKED = {
    "aten::_foreach_clone": VERSION < (2, 12),
    "aten::cholesky": VERSION >= (2, 14),
    "aten::linalg_matrix_sqrth": VERSION < (2, 14),
}


@pytest.mark.long
def test_an_op_that_torch_lacks_is_a_line_less_of_its_table() -> None:
    program = Path(__file__).parents[2] / "support" / "removed_ops.py"
    drawn = random.Random(0 if "CI" in os.environ else None)
    seeds = ["0", *(str(drawn.randrange(1, 10**6)) for _ in range(2))]
    run = subprocess.run([sys.executable, program, *seeds], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    whole, *others = map(json.loads, run.stdout.splitlines())
    assert whole["LACKING"] == sorted(name for name, lacked in LACKED.items() if lacked)
    assert len(others) == 2
    for row in others:
        removed = set(row["removed"])
        twins = {name.replace("aten::", "drawn::") for name in removed}
        for table in ("RULES", "DECOMPOSITIONS", "EXPANSIONS"):
            left = set(whole[table]) - removed - twins
            assert set(row[table]) == left != set(whole[table]), (seeds, table)


def test_a_lacking_op_says_its_name() -> None:
    lacking = aten.no_such_op.Tensor
    assert isinstance(lacking, LackingOp) and not lacking
    with pytest.raises(RuleError, match=r"torch \S+ has no op aten::no_such_op\.Tensor, which autopar needs here"):
        lacking(1)
    with pytest.raises(RuleError, match=r"torch has no op 'no_such_op'; write it as 'add\.Tensor' or 'library::op'"):
        overload("no_such_op")
    assert op_named("add.Tensor") is aten.add.Tensor is torch.ops.aten.add.Tensor
    rows = {aten.add.Tensor: 1, lacking: 2, aten.mul.Tensor: lacking, aten.sub.Tensor: (0, lacking)}
    assert present(rows) == {aten.add.Tensor: 1}
    assert packets("fill_ no_such_op_") == {torch.ops.aten.fill_}
