"""The house rules: imports point one way, private torch in one package, small files, a wheel that is whole."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from source_trees import imports

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "autopar").glob("**/*.py"), *(ROOT / "passes").glob("*.py")])
SOURCES = [path for path in SOURCES if (ROOT / "autopar" / "passes") not in path.parents]

# each package may import from itself and from packages above it, lazily and for types too
PACKAGES: tuple[str, ...] = (
    "errors", "torch_private", "gc_pause", "notebook", "traces", "ir", "optimizers", "rules", "costs", "transitions",
    "verify", "pipeline", "timetable", "report", "capture", "plan", "search", "scheduling", "passes", "runtime",
    "cache", "page", "model", "step", "checkpoint", "parallel", "data", "elastic", "api", "torch_compile", "__init__",
    "cli", "__main__", "examples",
)  # fmt: skip
# each folder of a package, and the package's own modules among them, import only what stands before them
FOLDERS = {
    "search": ("certificate", "transfer_prices", "solver", "problem", "memory", "starts", "symbols", "solutions",
               "search", "devices"),
}  # fmt: skip
LATER: set[str] = set()  # packages that are not there yet
WITHOUT_TORCH = (
    "errors",
    "ir.mesh",
    "ir.layout",
    "rules.notation",
    "plan.plan",
    "plan.batch",
    "plan.matching",
    "plan.presets",
    "plan.spec",
    "pipeline.timeline",
    "pipeline",
    *(f"scheduling.{module}" for module in (
        "op", "graph", "lines", "verify", "simulation", "interference", "memory", "bounds", "dispatch", "buckets",
        "priorities", "list_scheduling", "policies", "longest_tail", "fusing", "exact", "placement", "decide",
        "scheduled", "tuning",
    )),
)  # fmt: skip


def package_of(module: str) -> str:
    """``autopar.ir.mesh`` → ``ir``"""
    return module.split(".")[1] if "." in module else "__init__"


def module_of(path: Path) -> str:
    """``autopar/ir/mesh.py`` → ``autopar.ir.mesh``; ``passes`` is imported as ``autopar.passes``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("autopar", *parts) if parts[0] == "passes" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """All modules that a module imports: when it is loaded, inside functions, and for types alone."""
    found: set[str] = set()
    for node in imports(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(member if member in MODULES else node.module for member in members)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return frozenset(found - {module})


@pytest.mark.parametrize("package", [package for package in PACKAGES if package not in LATER])
def test_imports_point_one_way(package: str) -> None:
    for module in MODULES:
        if package_of(module) == package:
            check_imports(module)


def check_imports(module: str) -> None:
    own = package_of(module)
    for other in imports_of(module):
        if other.split(".")[0] == "autopar":
            there = package_of(other)
            assert PACKAGES.index(there) <= PACKAGES.index(own), f"{module} imports {other}: {own} stands above {there}"
    of_programs = module.startswith("autopar.scheduling.programs")
    if f"{module}.".startswith(tuple(f"autopar.{free}." for free in WITHOUT_TORCH)) and not of_programs:
        assert not any(other.split(".")[0] == "torch" for other in imports_of(module)), module
    if own == "passes" and MODULES[module].stem not in ("__init__", "manager"):
        siblings = {other for other in imports_of(module) if other.startswith("autopar.passes.")} - {
            "autopar.passes.manager"
        }
        assert not siblings, f"{module}: a pass imports no other pass"


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_of_a_package_import_one_way(package: str) -> None:
    order, prefix = FOLDERS[package], f"autopar.{package}."
    own = {module: module.removeprefix(prefix).split(".")[0] for module in MODULES if module.startswith(prefix)}
    assert set(own.values()) == set(order)
    for module, folder in own.items():
        for other in imports_of(module) & set(own):
            assert order.index(own[other]) <= order.index(folder), f"{module} imports {other}"


def test_no_module_is_in_a_circle() -> None:
    """``CycleError`` names the modules of a circle."""
    graphlib.TopologicalSorter({module: imports_of(module) & set(MODULES) for module in MODULES}).prepare()


def test_every_part_has_a_package() -> None:
    assert {package_of(module) for module in MODULES} | LATER == set(PACKAGES)


PRIVATE = re.compile(
    r"\btorch\.(?:\w+\.)*_(?!_)\w+|\bfrom torch(?:\.\w+)*\._\w+|\bfrom torch(?:\.\w+)* import (?:.*, )?_\w+|ops\._c10d"
)


IN_TORCH_PRIVATE = [path for path in SOURCES if path.parent.name == "torch_private"]


def test_private_torch_is_used_in_one_package() -> None:
    uses = {}
    for path in SOURCES:
        # an error quotes register_pytree_node to users
        text = "\n".join(line for line in path.read_text().splitlines() if "register_pytree_node" not in line)
        if path not in IN_TORCH_PRIVATE and (use := PRIVATE.search(text)):
            uses[str(path.relative_to(ROOT))] = use[0]
    assert not uses


TRIED = "ried on 2.11 to 2.15"


def test_private_names_say_where_they_were_tried() -> None:
    """On the line, on the one before, or in the docstring of the function or class that uses the name."""
    uses: list[str] = []
    for path in IN_TORCH_PRIVATE:
        lines = path.read_text().splitlines()
        said = {
            line
            for part in ast.walk(ast.parse(path.read_text()))
            if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and TRIED in (ast.get_docstring(part) or "")
            for line in range(part.lineno, (part.end_lineno or 0) + 1)
        }
        for number, line in enumerate(lines, 1):
            near = " ".join(lines[max(number - 4, 0) : number + 1])
            if PRIVATE.search(line) and number not in said and TRIED not in near:
                uses.append(f"{path.name}:{number}: {line}")
    assert not uses


def test_only_program_and_capture_touch_meta() -> None:
    for path in SOURCES:
        if (
            module_of(path) not in ("autopar.ir.nodes", "autopar.ir.fake_graph")
            and package_of(module_of(path)) != "capture"
        ):
            assert not re.search(r"\.meta\b(?!``)", path.read_text()), path


def test_no_name_that_says_nothing_and_no_long_file() -> None:
    for path in SOURCES:
        assert path.stem not in ("utils", "common", "helpers", "misc")
        assert len(path.read_text().splitlines()) <= 500, f"{path} is a design question"


def test_the_packages_are_those_of_the_tree() -> None:
    """They are listed, because what finds packages follows the link ``autopar/passes``, and some checkouts have
    none."""
    listed = re.search(r"^packages = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.parent.name != "passes"}
    assert ast.literal_eval(listed[1]) == sorted(there | {"autopar.passes"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout, without tests and profiling."""
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "profiling")
    shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=skipped)
    return tmp_path / "source"


def without_link(source: Path, kind: str) -> None:
    """As git checks a link out where there are none, or as some archives leave it out."""
    link = source / "autopar" / "passes"
    assert link.is_symlink()
    if kind != "a link":
        link.unlink()
    if kind == "a text file":
        link.write_text("../passes")


def run_python(code: str, site: Path) -> str:
    """What a program prints in which the folder ``site`` is imported from."""
    return subprocess.run([sys.executable, "-c", code], cwd=site.parent, env={"PYTHONPATH": str(site)},
                          check=True, capture_output=True, text=True).stdout.strip()  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["a link", "a text file"])
def test_a_built_wheel_holds_the_passes(kind: str, source: Path, tmp_path: Path) -> None:
    """A wheel has the files of ``passes/`` as ``autopar.passes``, and no top-level ``passes``, also where a checkout
    has no links."""
    without_link(source, kind)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert sorted(p.name for p in site.iterdir() if not p.name.endswith(".dist-info")) == ["autopar"]
    assert {p.relative_to(site) for p in site.glob("autopar/**/*.py")} == {
        Path("autopar", path.relative_to(ROOT)) if path.parent.name == "passes" else path.relative_to(ROOT)
        for path in SOURCES
    }
    assert (site / "autopar" / "ir" / "text" / "GRAMMAR.md").is_file()
    assert (site / "autopar" / "passes" / "README.md").is_file()
    assert (site / "autopar" / "costs" / "machines.json").is_file()
    assert (site / "autopar" / "py.typed").is_file()
    found = run_python("import autopar, autopar.passes.reshard; print(autopar.passes.__file__)", site)
    assert found == str(site / "autopar" / "passes" / "__init__.py")


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["a link", "a text file", "nothing"])
def test_a_checkout_without_links_can_be_imported(kind: str, source: Path) -> None:
    without_link(source, kind)
    code = (
        "import autopar.passes.reshard as r; from autopar.passes import Reshard; "
        "print(Reshard is r.Reshard, r.__file__)"
    )
    folder = source / "autopar" / "passes" if kind == "a link" else source / "passes"
    assert run_python(code, source) == f"True {folder / 'reshard.py'}"


def test_missing_passes_are_named(source: Path) -> None:
    without_link(source, "a text file")
    shutil.rmtree(source / "passes")
    code = "import autopar\ntry:\n    autopar.passes\nexcept ModuleNotFoundError as error:\n    print(error)"
    said = (
        f"autopar.passes is missing: neither {source}/autopar/passes nor {source}/passes is a folder; copy the folder"
    )
    assert run_python(code, source).startswith(said)


def test_classes_of_a_step_and_what_runs_it_have_names_of_their_own() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        if package_of(module_of(path)) in ("step", "runtime", "model", "pipeline", "timetable"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(module_of(path))
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}
