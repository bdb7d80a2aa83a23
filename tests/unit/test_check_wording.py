"""scripts/check_wording finds what the project's rules forbid, and accepts plain text."""

from __future__ import annotations

from collections import defaultdict
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_wording"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    loader = SourceFileLoader("check_wording", str(SCRIPT))
    spec = spec_from_loader("check_wording", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "SRC", tmp_path)
    return module


@pytest.mark.parametrize(
    "source",
    [
        "def told(): ...",
        "class A:\n    @property\n    def _closed(self): ...",
        '"""Waits for whoever comes."""',
        "x = 1  # as nobody knows",
        'raise ValueError(f"the worker {x} was told to stop")',
        "PATIENCE = 3.0",
        "def f(who): ...",
        "for said in []: ...",
    ],
)
def test_forbidden_wording_is_found(script: Any, tmp_path: Path, source: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(source)
    assert len(list(script.python_findings(file, defaultdict(list)))) == 1


@pytest.mark.parametrize("source", ["def is_closed(): ...", "def embed(): ...", "CONNECT_TIMEOUT_S = 3.0", "whose = 1"])
def test_plain_wording_is_accepted(script: Any, tmp_path: Path, source: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(source)
    assert not list(script.python_findings(file, defaultdict(list)))


def test_class_name_defined_twice_is_found(script: Any, tmp_path: Path) -> None:
    classes: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("class Plan: ...\nclass _Private: ...")
        assert not list(script.python_findings(tmp_path / name, classes))
    assert len(list(script.class_findings(classes))) == 2
