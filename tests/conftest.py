"""Mark each test with its tier, rewrite golden files on request, and check that every verified program prints and
parses back."""

from __future__ import annotations

import gc
import hashlib
import os
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import autopar.model.compiled
import autopar.passes.manager
from autopar.ir.program import Program
from autopar.verify.levels import verify

# tests test the code, and not what an earlier run has kept; a test of the cache gives a folder
os.environ["AUTOPAR_CACHE"] = ""

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

# processes that tests start are on CPUs: one that sees a GPU must not fork after a backward, and ranks of tests are
# forked from processes that have captured. This process keeps the GPU that it has seen
if torch.cuda.is_available():
    torch.cuda.init()
    torch.cuda.device_count()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# no test has a deadline: other processes share the machine
settings.register_profile("anywhere", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)  # it repeats itself; others look for something new
settings.load_profile("ci" if os.environ.get("CI") else "anywhere")


# a full collection looks through a million objects, of all tests and models, and took a tenth of the time
gc.freeze()
gc.set_threshold(700, 10, 100)

PARSED_BACK: set[bytes] = set()  # digests of the texts that this process has parsed back

# folder → the tier of its tests; a test with the marker of another tier belongs to that one
FOLDERS = {
    "unit": "fast",
    "structure": "fast",
    "golden": "fast",
    "simulated": "simulated",
    "processes": "processes",
    "models": "models",
}
TIERS = {
    "fast": "a unit, the structure of the sources, or a golden file; a few seconds at most",
    "simulated": "a whole model or step on simulated ranks, in one process; or a unit that takes a fifth of a second",
    "long": "such a test, if it takes more than a second",
    "processes": "starts processes: ranks, jobs of torchrun, what is killed",
    "models": "large models, and the zoo of architectures",
}


def pytest_configure(config: pytest.Config) -> None:
    for tier, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")
    config.addinivalue_line("markers", "sweep(reason): one more combination; it runs with --sweep only")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the tier of its folder, before pytest selects by ``-m``, and leave sweeps out."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            folder = item.path.relative_to(Path(__file__).parent).parts[0]
            item.add_marker(FOLDERS[folder])
    if not config.getoption("--sweep"):
        sweeps = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=sweeps)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the folders of tiers above the selected ones: importing their tests takes every worker some seconds.

    The marker of a test may name a tier above its folder's, and none below: ``test_tests.py`` checks it.
    """
    selected = set(config.getoption("markexpr").split()) - {"or"}
    order = list(TIERS)
    tier = FOLDERS.get(collection_path.name)
    if tier is None or not collection_path.is_dir() or not selected or not selected <= set(order):
        return None
    return True if order.index(tier) > max(map(order.index, selected)) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite the expected half of tests/golden files")
    parser.addoption("--sweep", action="store_true", help="run the tests with the marker sweep too")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-goldens")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of ``steps.Pair``."""
    return torch.randn(8, 8), torch.randn(8, 8)


@pytest.fixture(autouse=True)
def round_trip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a pass made, in any test: its text parses back to the same program, and prints the same again.

    Of the programs of whole models and steps, which are long and alike, this checks one in four, unless with --sweep.
    """
    share = 1 if request.node.get_closest_marker("fast") or request.config.getoption("--sweep") else 4

    def verify_text_too(program: Program, made_by: str = "") -> None:
        verify(program, made_by)
        if zlib.crc32(f"{made_by} {program.counts}".encode()) % share:
            return
        text = str(program)
        digest = hashlib.blake2b(text.encode()).digest()
        if digest in PARSED_BACK:  # many passes leave a program as it was, and many tests make the same one
            return
        PARSED_BACK.add(digest)
        again = Program.parse(text)
        assert again == program, made_by
        assert str(again) == text, made_by

    for module in (autopar.model.compiled, autopar.passes.manager):
        monkeypatch.setattr(module, "verify", verify_text_too)
