"""Budgets for files and functions. An exception is one visible line here, with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

from statements import walk_statements

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

FILES: dict[str, tuple[int, str]] = {}
FUNCTIONS: dict[str, tuple[int, str]] = {}


def test_files_are_short() -> None:
    over = []
    for path in sorted(p for kind in ("py", "cpp", "h", "js", "mjs") for p in ROOT.glob(f"src/**/*.{kind}")):
        name = str(path.relative_to(ROOT))
        lines = len(path.read_text().splitlines())
        if lines > FILES.get(name, (MAX_FILE_LINES, ""))[0]:
            over.append(f"{name}: {lines}")
    assert not over, over


def test_functions_are_short() -> None:
    over = []
    for path in sorted(ROOT.glob("src/**/*.py")):
        for node in walk_statements(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT)}:{node.name}"
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTIONS.get(name, (MAX_FUNCTION_LINES, ""))[0]:
                    over.append(f"{name}: {lines}")
    assert not over, over
