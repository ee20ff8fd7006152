"""Parse each Python file of the project once for all tests of its structure."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def imports(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return all imports of a file, those inside functions and for types alone too."""
    return tuple(
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
    )
