"""Read from the user's source what a statement does with the truth of a tensor: it only raises, warns, or skips work.

A test is a tree of ``and``, ``or`` and ``not``. Where each of its leaves has the same sign, one answer for all leaves
gives the test a known answer: ``assert not x.isnan().any() and not y.isnan().any()`` passes if both are false.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import sys
import types
from typing import NamedTuple

from autopar.capture.provenance import is_users

MONOTONE = frozenset({"all", "any", "bool", "len", "isinstance", "hasattr", "getattr", "callable"})
SAYING = frozenset({"warn", "warn_once", "warning", "warning_once", "info", "debug", "print", "error", "warn_advice"})


class Statement(NamedTuple):
    """A statement that reads the truth of a tensor.

    Attributes:
        kind: ``check`` (the other branch only raises or warns), ``skip`` (one branch leaves the turn of a loop),
            ``branch`` (one branch has work, and there is no other).
        answer: what each leaf of the test is where the check passes, or the work is done.
        first, last: the lines of the work that is done under this condition.
        test: the first and the last line of the test.
    """

    kind: str
    answer: bool
    first: int
    last: int
    test: tuple[int, int] = (0, 0)


def users_frame() -> types.FrameType | None:
    """Return the innermost frame of the user."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def statement_at(frame: types.FrameType) -> Statement | None:
    """Return what the statement that a frame runs does with the truth of a tensor; ``None`` if that is not known."""
    path = _path_to(_parsed(frame.f_code.co_filename), frame.f_lineno, _column(frame))
    node = path[-1] if path else None
    if not isinstance(node, (ast.Assert, ast.If)) or not _within(node.test, frame.f_lineno):
        return None
    if isinstance(node, ast.Assert) or _only_says(node.body):
        sign = _sign(node.test, isinstance(node, ast.Assert))
        return None if sign is None else Statement("check", sign, 0, 0)
    if node.body[0].lineno <= frame.f_lineno:
        return None  # work on the line of its test, which lines cannot tell apart
    lines = node.test.lineno, node.test.end_lineno or node.test.lineno
    skips = isinstance(node.body[-1], ast.Continue) and _only_says(node.body[:-1])
    sign = _sign(node.test, not skips, exact=True)
    if node.orelse or sign is None:
        return None
    if skips:
        loop = next(outer for outer in reversed(path) if isinstance(outer, (ast.For, ast.While)))
        return Statement("skip", sign, (node.end_lineno or 0) + 1, loop.body[-1].end_lineno or 0, lines)
    return Statement("branch", sign, node.body[0].lineno, node.body[-1].end_lineno or 0, lines)


def _only_says(body: list[ast.stmt]) -> bool:
    """Return whether statements only raise an error, or write a message."""
    return all(
        isinstance(one, ast.Raise)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and _name(one.value.func) in SAYING)
        for one in body
    )


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _sign(test: ast.expr, wanted: bool, exact: bool = False) -> bool | None:
    """Return the answer of all leaves for which a test has the wanted answer; ``None`` if they differ or are unknown.

    Args:
        exact: whether the test must have the answer only if all its leaves have theirs. One leaf decides an ``and``
            that is false, and an ``or`` that is true.
    """
    if isinstance(test, ast.BoolOp):
        parts = [part for part in test.values if not _of_python(part)]
        if exact and len(parts) > 1 and isinstance(test.op, ast.And) != wanted:
            return None
        signs = {_sign(part, wanted, exact) for part in parts}
        return signs.pop() if len(signs) == 1 else None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _sign(test.operand, not wanted, exact)
    for node in ast.walk(test):
        if isinstance(node, (ast.IfExp, ast.NamedExpr, ast.Lambda, ast.Await, ast.BoolOp)):
            return None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return None
        if isinstance(node, ast.Compare) and len(node.ops) > 1 and exact and not wanted:
            return None
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if called is not None and (called not in MONOTONE or (exact and called == ("any" if wanted else "all"))):
            return None
    return wanted


def _of_python(test: ast.expr) -> bool:
    """Return whether a test compares with ``None``, or asks for a type: it reads no tensor."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _of_python(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
    return isinstance(test, ast.Call) and _name(test.func) in ("isinstance", "hasattr", "callable")


def _within(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _column(frame: types.FrameType) -> int | None:
    """Return the column of what a frame runs; ``None`` before Python 3.11, which does not know it."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return None
    return next(itertools.islice(positions(), frame.f_lasti // 2, None))[2]


def _path_to(tree: ast.AST | None, line: int, column: int | None = None) -> list[ast.stmt]:
    """Return the statements around a line, from the outermost to the innermost; or around a column of it."""

    def around(node: ast.stmt) -> bool:
        if column is None:
            return node.lineno <= line <= (node.end_lineno or 0)
        return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno or 0, node.end_col_offset or 0)

    path: list[ast.stmt] = []
    node = tree
    while node is not None:
        inner = (
            child for child in ast.walk(node) if child is not node and isinstance(child, ast.stmt) and around(child)
        )
        node = next(inner, None)  # breadth first, so the outermost comes first
        if node is not None:
            path.append(node)
    return path


@functools.lru_cache(maxsize=64)
def _parsed(filename: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


def block_at(frame: types.FrameType, first: int, last: int) -> list[ast.stmt]:
    """Return the outermost statements of a file that are within these lines."""
    found: list[ast.stmt] = []
    tree = _parsed(frame.f_code.co_filename)
    open_ = [] if tree is None else [tree]
    while open_:
        for child in ast.iter_child_nodes(open_.pop()):
            if isinstance(child, ast.stmt) and first <= child.lineno and (child.end_lineno or 0) <= last:
                found.append(child)
            else:
                open_.append(child)
    return found


def loop_at(frame: types.FrameType) -> ast.For | None:
    """Return the ``for`` whose values a frame is asking for."""
    path = _path_to(_parsed(frame.f_code.co_filename), frame.f_lineno)
    node = path[-1] if path else None
    return node if isinstance(node, ast.For) and _within(node.iter, frame.f_lineno) and not node.orelse else None


LENGTHS: dict[tuple[type, int], bool] = {  # comparison of a length with a number → what it is where there are rows
    (ast.Eq, 0): False,
    (ast.NotEq, 0): True,
    (ast.Gt, 0): True,
    (ast.GtE, 1): True,
    (ast.Lt, 1): False,
    (ast.LtE, 0): False,
}


def answer_of_length(frame: types.FrameType) -> bool | None:
    """Return the answer of ``if len(rows) > 0:`` and its like where there are rows; ``None`` for another statement."""
    path = _path_to(_parsed(frame.f_code.co_filename), frame.f_lineno)
    test = getattr(path[-1] if path else None, "test", None)
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if isinstance(test, ast.Call):
        return True if _name(test.func) == "len" else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Call):
        number = test.comparators[0]
        if _name(test.left.func) == "len" and isinstance(number, ast.Constant) and type(number.value) is int:
            return LENGTHS.get((type(test.ops[0]), number.value))
    return None


def adds_at(frame: types.FrameType) -> bool:
    """Return whether a frame runs ``x[rows] += values``."""
    path = _path_to(_parsed(frame.f_code.co_filename), frame.f_lineno)
    node = path[-1] if path else None
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Subscript)


def stored_names(block: list[ast.stmt]) -> frozenset[str]:
    """Return the variables that statements assign."""
    nodes = (node for one in block for node in ast.walk(one))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def leaves_early(block: list[ast.stmt]) -> bool:
    """Return whether statements may leave the block that they are in, otherwise than to the next turn of a loop."""
    nodes = (node for one in block for node in ast.walk(one))
    return any(isinstance(node, (ast.Return, ast.Break, ast.Yield, ast.YieldFrom)) for node in nodes)
