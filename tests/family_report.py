"""A pytest plugin that writes the distances that test_transformers_on_gpu.py measures to a file.

Results of an earlier run stay in the file, with their commit, until the same case is measured again.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from emberline.bench.machine import describe_commit
from emberline.bench.report import round_significant

PACKAGES = ("transformers", "torch", "triton")
UNIT = "nat"
METHOD = (
    "largest difference of log-probabilities from transformers in float32 on the same GPU, over all tokens of prompts"
    " and outputs and the 20 most probable ones, with its mean and median; peer: those of transformers in bfloat16;"
    " prefill: tokens that prompt tokens predict. With experts only the median has a limit in bfloat16, since a row"
    " may select other experts"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--families-json", type=Path, help="file for the distances between the engine and transformers")
    parser.addoption("--families-commit", help="commit of this code, if it has no repository")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--families-json")
    if file is not None and not hasattr(config, "workerinput"):  # only one process of pytest-xdist writes
        config.pluginmanager.register(FamilyReport(file, describe_commit(config.getoption("--families-commit"))))


class FamilyReport:
    def __init__(self, file: Path, commit: str) -> None:
        self._file, self._commit, self._gpu = file, commit, _read_gpu()
        kept = json.loads(file.read_text("utf-8"))["results"] if file.exists() else {}
        self._results: dict[str, dict[str, Any]] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rows = [dict(value) for key, value in report.user_properties if key == "family"]
        if report.when != "call" or not rows:
            return
        for row in rows:
            self._results[row["name"]] = self._make_result(row) | {"passed": report.passed, "commit": self._commit}
        self._write()  # at once: the run may be interrupted

    def _make_result(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with the largest difference as its value, and other differences by their names."""
        result: dict[str, Any] = {"unit": UNIT, "kernels": row["kernels"]}
        for kind, differences in (("", row["ours"]), ("limit", row["limits"]), ("peer", row.get("peer", {}))):
            for name, value in differences.items():
                parts = [part for part in (name.replace("largest", ""), kind) if part]
                result["_".join(parts) or "value"] = round_significant(value, 3)
        return result

    def _write(self) -> None:
        arguments = shlex.join(sys.argv[1:])
        whole = {
            "bench": "gpu-families",
            "command": f"python -m pytest {arguments}",
            "commit": self._commit,
            "hardware": self._gpu,
            "software": {name: _find_version(name) for name in PACKAGES},
            "config": {"method": METHOD},
            "results": dict(sorted(self._results.items())),
        }
        self._file.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


def _read_gpu() -> str:
    command = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
