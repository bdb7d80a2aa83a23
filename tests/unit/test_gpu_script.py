"""scripts/test-gpu: what it writes down of a run is what happened."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-gpu"
MIXED = """
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_left_out(): pass
@pytest.fixture
def broken(): raise OSError
def test_without_its_fixture(broken): pass
"""
SKIPPED = "import pytest\n\n@pytest.mark.skip\ndef test_needs_a_gpu(): pass\n"


def test_last_result_of_each_file_is_kept(tmp_path: Path) -> None:
    files = {name: tmp_path / f"test_{name}.py" for name in ("mixed", "skipped", "empty")}
    files["mixed"].write_text(MIXED)
    files["skipped"].write_text(SKIPPED)
    files["empty"].write_text("import nothing_of_that_name\n")
    kept = tmp_path / "kept.json"
    before = {"passed": 3, "failed": 0, "commit": "old"}
    kept.write_text(json.dumps({"results": {"test_skipped.py": before, "test_mixed.py": before}}))
    command = [sys.executable, str(SCRIPT), "--commit", "new", "--json", str(kept), *map(str, files.values())]
    # Plugins take most of the time in which pytest starts.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    assert subprocess.run(command, capture_output=True, timeout=120, env=environment).returncode == 1
    results = json.loads(kept.read_text())["results"]
    assert results["test_skipped.py"] == before, "nothing ran, so nothing is known"
    mixed = results["test_mixed.py"]
    assert (mixed["passed"], mixed["skipped"], mixed["failed"], mixed["commit"]) == (1, 1, 2, "new")
    assert mixed["failures"] == ["test_bad", "test_without_its_fixture"]
    assert results["test_empty.py"]["failed"] == 1


def test_processes_share_the_tests_of_a_file(tmp_path: Path) -> None:
    file, kept = tmp_path / "test_mixed.py", tmp_path / "kept.json"
    file.write_text(MIXED)
    command = [sys.executable, str(SCRIPT), "--commit", "new", "--json", str(kept), "--processes", "3", str(file)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    assert subprocess.run(command, capture_output=True, timeout=120, env=environment).returncode == 1
    mixed = json.loads(kept.read_text())["results"]["test_mixed.py"]
    assert (mixed["passed"], mixed["skipped"], mixed["failed"]) == (1, 1, 2)
    assert sorted(mixed["failures"]) == ["test_bad", "test_without_its_fixture"]


@pytest.mark.parametrize(
    ("name", "file"),
    [("test_engine.py", "h200-tests.json"), ("test_rank_engine_on_gpu.py", "h200-ranks.json")],
)
def test_results_of_ranks_have_a_file_of_their_own(name: str, file: str) -> None:
    results_file = runpy.run_path(str(SCRIPT))["results_file"]
    assert results_file(Path("tests/gpu") / name).name == file
