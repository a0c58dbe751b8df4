"""A copy of a kernel's source in which options are off and what they guarded is gone.

The build with an option off must equal the build of this copy: the option costs nothing when off.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

KEPT = ("__", "test_")


class _Fold(ast.NodeTransformer):
    """Replaces `config.NAME` by constants, and drops branches that cannot run."""

    def __init__(self, options: Mapping[str, bool]) -> None:
        self.options = options

    @staticmethod
    def _of_config(node: ast.expr) -> bool:
        """Whether it is `config` or `anything.config`."""
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return bool(name == "config")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self._of_config(node.value) and node.attr in self.options:
            return ast.copy_location(ast.Constant(self.options[node.attr]), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == "const_expr" and isinstance(node.args[0], ast.Constant):
            return node.args[0]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant):
            return ast.copy_location(ast.Constant(not node.operand.value), node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        ends = isinstance(node.op, ast.Or)
        left = []
        for value in node.values:
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                if value.value is ends:
                    return ast.copy_location(ast.Constant(ends), node)
                continue
            left.append(value)
        if len(left) < 2:
            return left[0] if left else ast.copy_location(ast.Constant(not ends), node)
        node.values = left
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return (node.body if node.test.value else node.orelse) or [ast.Pass()]
        return node


def _names(tree: ast.AST) -> set[str]:
    """Every name that the code uses, definitions and imports aside."""
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return used | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


class _Drop(ast.NodeTransformer):
    """Removes functions that nobody uses, and their imports."""

    def __init__(self, used: set[str]) -> None:
        self.used = used
        self.dropped: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        self.generic_visit(node)
        if node.name in self.used or node.name.startswith(KEPT):
            return node
        self.dropped.add(node.name)
        return None


class _Forget(ast.NodeTransformer):
    """Removes imports of these names."""

    def __init__(self, gone: set[str]) -> None:
        self.gone = gone

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        node.names = [alias for alias in node.names if alias.name not in self.gone]
        return node if node.names else None


def ablate(
    folders: Mapping[str, Path], target: Path, options: Mapping[str, bool], entries: Sequence[str]
) -> dict[str, Path]:
    """Writes the copies; returns package -> folder. entries: functions called from outside."""
    trees: dict[Path, ast.Module] = {}
    copies = {}
    for package, folder in folders.items():
        copies[package] = target / package
        for path in sorted(folder.glob("*.py")):
            tree = _Fold(options).visit(ast.parse(path.read_text()))
            trees[copies[package] / path.name] = ast.fix_missing_locations(tree)
    gone: set[str] = set()
    while True:
        drop = _Drop(set(entries).union(*(_names(tree) for tree in trees.values())))
        for tree in trees.values():
            drop.visit(tree)
        if not drop.dropped:
            break
        gone |= drop.dropped
    for tree in trees.values():
        _Forget(gone).visit(tree)
    for path, tree in trees.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ast.unparse(tree) + "\n")
    return copies
