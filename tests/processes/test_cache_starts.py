"""Starts in new processes: one after another with other hashes of texts, at once, and with one that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autopar.cache.folder import Folder

SCRIPT = """
import sys, torch, autopar
from autopar.ir.program import text_digest

NAMES = {"a", "b", "c", "d"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.kinds, self.function = {"x", "y", "z"}, lambda x: x * 2.0

    def forward(self, x):
        if len(NAMES & self.kinds) == 0:
            x = self.function(x)
        return torch.nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.5).square().mean()


torch.manual_seed(0)
model = Net().double()
parallel = autopar.parallelize(model, autopar.Mesh(dp=2, tp=2), cache=sys.argv[1])
step = parallel.train_step(torch.optim.AdamW(model.parameters(), lr=0.1), clip_norm=1.0)
losses = [repr(float(step.simulate(torch.ones(4, 8, dtype=torch.float64)))) for _ in range(2)]
notes = [report.notes[0].partition(" ")[0] for report in step.reports if report.name.endswith("cache")]
print(*notes, *losses, text_digest(step.program.text(comments=True)), text_digest(str(step.local(3))))
"""


def begin(script: Path, folder: Path, hashes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONHASHSEED": hashes, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.split()


def test_starts_in_new_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    both = [begin(script, tmp_path / "c", hashes) for hashes in ("1", "2")]  # at once: they write the same entries
    first, second = map(ended, both)
    third = ended(begin(script, tmp_path / "c", "3"))
    assert third[:2] == ["hit:", "hit:"]
    assert first[2:4] == second[2:4] == third[2:4]
    assert first[2:] == third[2:] or second[2:] == third[2:]
    left = [path.name for path in Folder(tmp_path / "c").root.iterdir() if path.name.startswith(".")]
    assert left == []
    script.write_text(SCRIPT.replace("x * 2.0", "x * 3.0"))
    changed = ended(begin(script, tmp_path / "c", "4"))
    assert changed[:2] == ["miss:", "miss:"] and changed[2:4] != first[2:4]
