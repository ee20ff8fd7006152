"""Import a function or a class of the user's, from ``FILE.py:NAME`` or ``package.module:NAME``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.cli.models.raised import raised
from autopar.cli.train.refused import Refused


def function_of(name: str, returns: str) -> Callable[[], Any]:
    """Return a function or a class that is called without arguments.

    Args:
        name: where it is, as ``model.py:make``.
        returns: what it should return, which an error says.

    Raises:
        Refused: there is no such file or name, the file cannot be imported, or the function needs arguments.
    """
    where, separator, function = name.rpartition(":")
    if not separator or not where or not function:
        raise Refused(f"{name} names no function; write FILE.py:FUNCTION, as in model.py:make; {returns}")
    made = getattr(module_of(where), function, None)
    if not callable(made):
        names = names_in(getattr(module_of(where), "__file__", None) or "")
        has = f"; it has {', '.join(names)}" if names else ""
        raise Refused(f"{where} has no function {function}{has}; {returns}")
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise Refused(f"{name} is called without arguments, and it has one ({error}); {returns}") from None
    except ValueError:  # it has no signature, as a few builtins
        pass
    return made


def names_in(where: str) -> list[str]:
    """Return the functions and classes that a file defines and that can be called without arguments; it is not run."""
    try:
        tree = ast.parse(Path(where).read_text())
    except (OSError, ValueError, SyntaxError):
        return []
    return [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and _is_callable_alone(node)
    ]


def called(name: str, function: Callable[[], Any]) -> Any:
    """Return what a function of the user's returns; ``Refused`` says what it raises."""
    try:
        return function()
    except Exception as error:
        raise Refused(f"{name} raises {raised(error)}; correct it: autopar calls it without arguments") from error


def module_of(where: str) -> ModuleType:
    """Import a file or a module by its name; a file that was imported before is not run again."""
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
                raise Refused(f"there is no module {error.name}; name a file, as in model.py:make") from None
            raise Refused(_not_imported(where, error, f"python -m {where}")) from None
    path = Path(where)
    if not path.is_file():
        raise Refused(f"there is no file {where}; name one that makes a model, as in model.py:make")
    known = sys.modules.get(path.stem)
    if known is not None and known.__dict__.get("__file__") == str(path.resolve()):
        return known
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script, so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        raise Refused(_not_imported(where, error, f"python {where}")) from None
    return module


def _is_callable_alone(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether a function, or the ``__init__`` of a class, has no required arguments."""
    if isinstance(node, ast.FunctionDef):
        needed = node.args.posonlyargs + node.args.args
        return len(needed) <= len(node.args.defaults) and all(node.args.kw_defaults)
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return all(len(each.args.posonlyargs + each.args.args) - 1 <= len(each.args.defaults) for each in inits)


def _not_imported(where: str, error: BaseException, command: str) -> str:
    return f"{where} cannot be imported: {raised(error)}; {command} shows all of it"
