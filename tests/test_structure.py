"""The house rules: imports point one way, private torch in one file, the README's table is true, small files."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "autopar").glob("**/*.py"), *(ROOT / "passes").glob("*.py")])
SOURCES = [path for path in SOURCES if (ROOT / "autopar" / "passes") not in path.parents]

# each part may import only from rows above its own, or from its own row where that is marked
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("mesh", "notation", "torch_private", "collector", "progress"),
    ("dense", "layout", "structure", "inventory", "held", "drawn", "timeline"),
    ("boxes", "optimizers", "squares"),
    ("messages",),
    ("dtensor",),
    ("record",),
    ("program", "transfers", "machine"),
    ("text", "uses", "undo", "bound", "blocks"),
    ("commit",),
    ("edit",),
    ("rules", "transitions"),
    ("verify", "choice", "channels", "cost", "liveness", "precision", "loss_scaling"),
    ("pipeline", "arena"),
    ("decompose_batch_norm", "decompose_lists", "decompose_strides"),
    ("report", "recompute", "provenance", "decompositions", "spec", "arguments", "borrow", "specialize"),
    ("naming", "subgraph", "expansions", "guards"),
    ("completion",),
    ("presets", "decompose_unknown"),
    ("plan",),
    ("localize",),
    ("capture", "runtime", "passes"),
    ("relay",),
    ("constraints", "shards"),
    ("inputs", "uneven", "initialize"),
    ("compiled",),
    ("weights", "wrappers"),
    ("model",),
    ("step",),
    ("checkpoint",),
    ("parallel",),
    ("api",),
    ("",),  # the package itself
    ("train",),
    ("cli",),
    ("__main__",),
)
# imports that run backwards today: each is to be cut
DEBTS = {
    ("program", "edit"), ("program", "text"), ("program", "verify"), ("rules", "runtime"), ("spec", "dtensor"),
    ("plan", "naming"),
}  # fmt: skip
RANK = {part: row for row, parts in enumerate(ORDER) for part in parts}
WITHOUT_TORCH = ("mesh", "notation", "layout", "errors", "plan", "presets", "spec", "timeline", "pipeline")


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "passes":
        return "passes"
    name = relative.parts[1].removesuffix(".py")
    return "" if name == "__init__" else name


def imported(tree: ast.Module) -> list[str]:
    """All modules that a file imports: when it is loaded, inside functions, and for types alone."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(ROOT)) for p in SOURCES])
def test_imports_point_one_way(path: Path) -> None:
    own = part_of(path)
    modules = imported(ast.parse(path.read_text()))
    for module in modules:
        if module.startswith("autopar."):
            other = module.split(".")[1]
            if other in RANK and other != own and (own, other) not in DEBTS:
                assert RANK[other] < RANK[own], f"{own} imports {other}"
    if own in WITHOUT_TORCH:
        assert not any(module.split(".")[0] == "torch" for module in modules)
    if own == "passes" and path.stem not in ("__init__", "manager"):
        siblings = {m for m in modules if m.startswith("autopar.passes.")} - {"autopar.passes.manager", "autopar.passes.manager.Pass"}
        assert not siblings, "a pass imports no other pass"


def test_every_part_is_ordered() -> None:
    assert {part_of(path) for path in SOURCES} == set(RANK)


PRIVATE = re.compile(r"\btorch\.(?:\w+\.)*_(?!_)\w+|\bfrom torch(?:\.\w+)*\._\w+|\bfrom torch(?:\.\w+)* import (?:.*, )?_\w+|ops\._c10d")


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(ROOT)) for p in SOURCES])
def test_private_torch_lives_in_one_file(path: Path) -> None:
    if path.name == "torch_private.py":
        return
    text = "\n".join(line for line in path.read_text().splitlines() if "register_pytree_node" not in line)  # quoted to users
    found = PRIVATE.search(text)
    assert found is None, f"{path.name} uses {found and found[0]}"


def test_private_names_say_where_they_were_tried() -> None:
    text = (ROOT / "autopar" / "torch_private.py").read_text()
    uses = [line for line in text.splitlines() if re.search(r"torch\.(?:\w+\.)*_\w+", line) and "import" in line and "#" not in line]
    assert all(line.endswith("(") for line in uses), uses
    assert text.count("2.13") >= 10


def test_only_program_and_capture_touch_meta() -> None:
    for path in SOURCES:
        if part_of(path) not in ("program", "capture"):
            assert not re.search(r"\.meta\b(?!``)", path.read_text()), path


def test_no_name_that_says_nothing_and_no_long_file() -> None:
    for path in SOURCES:
        assert path.stem not in ("utils", "common", "helpers", "misc")
        assert len(path.read_text().splitlines()) <= 500, f"{path} is a design question"


def test_the_readme_names_every_part() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        path = ROOT / row
        assert path.is_dir() if row.endswith("/") else path.is_file(), row
    parts = {f"autopar/{part}.py" for part in RANK if part} | {f"autopar/{part}/" for part in RANK if part} | {"passes/", "tests/", "profiling/"}
    assert set(rows) <= parts
    missing = [part for part in RANK if part not in ("", "__main__") and not {f"autopar/{part}.py", f"autopar/{part}/", f"{part}/"} & set(rows)]
    assert not missing


def test_the_readmes_first_screen_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code prints what stands under it; files that the rest writes are not left here."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)[0]
    scope: dict[str, object] = {}
    exec(code, scope)
    assert capsys.readouterr().out.strip() == printed.strip()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in scope["model"].parameters())  # type: ignore[attr-defined]
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1:]:
        exec(block, scope)


def test_a_built_wheel_holds_the_passes(tmp_path: Path) -> None:
    """``autopar.passes`` is a link to ``passes/``; a wheel has the files, and no top-level ``passes``."""
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "profiling")
    shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=skipped)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(tmp_path / "source")], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert sorted(p.name for p in (tmp_path / "site").iterdir() if not p.name.endswith(".dist-info")) == ["autopar"]
    assert (tmp_path / "site" / "autopar" / "text" / "GRAMMAR.md").is_file()
    assert (tmp_path / "site" / "autopar" / "machines.json").is_file()
    code = "import autopar, autopar.passes.reshard, sys; print(autopar.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")},
                         check=True, capture_output=True, text=True)  # fmt: skip
    assert run.stdout.startswith(str(tmp_path))
