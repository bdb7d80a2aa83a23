"""The built wheel is complete, and without torch in its environment the router and the gateway start from it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from emberline.core.engine_packages import ENGINE_PACKAGES
from emberline.core.freeport import free_port

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: setuptools would put files of earlier builds into it."""
    copy, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, timeout=120, cwd=copy)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("emberline-*.whl")
    return built


def requirements_of(wheel: Path, extra: str) -> list[Requirement]:
    """Return what the wheel requires with an extra (with none if it is empty), without its own extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist")]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the packages that it requires without any extra."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    open_names, linked = [each.name for each in requirements_of(wheel, "")], set()
    while open_names:
        found = importlib.metadata.distribution(open_names.pop())
        if found.name in linked:
            continue
        linked.add(found.name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(str(found.locate_file(top)))
        needed = [Requirement(text) for text in found.requires or ()]
        open_names += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    install = [*PIP, "--python", str(home / "bin/python"), "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, str(wheel)], check=True, timeout=60, env=clean_variables(home))
    return home


def test_wheel_has_every_source_file(wheel: Path) -> None:
    sources = ROOT / "src"
    expected = {str(path.relative_to(sources)) for path in (sources / "emberline").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        missing = {name for name in expected if "__pycache__" not in name} - set(archive.namelist())
    assert not missing


def test_extras_have_their_packages(wheel: Path) -> None:
    base = {each.name for each in requirements_of(wheel, "")}
    assert not base & set(ENGINE_PACKAGES)
    assert {each.name for each in requirements_of(wheel, "cpu")} - base == {*ENGINE_PACKAGES, "huggingface_hub"}
    assert any(str(each).startswith("emberline[cpu]") for each in requirements_of(wheel, "gpu"))
    assert {each.name for each in requirements_of(wheel, "gateway")} - base == {"asyncpg", "hiredis"}
    assert any(str(each).startswith("emberline[ray]") for each in requirements_of(wheel, "cluster"))


def run_command(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [environment / "bin/emberline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_variables(environment))


def clean_variables(environment: Path) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EMBERLINE"))}
    return variables | {"EMBERLINE_CACHE": str(environment / "cache")}


def test_environment_has_no_engine_packages(environment: Path) -> None:
    code = f"import importlib.util; assert not any(map(importlib.util.find_spec, {ENGINE_PACKAGES!r}))"
    subprocess.run([environment / "bin/python", "-c", code], check=True, timeout=60, env=clean_variables(environment))


@pytest.fixture
def url(environment: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A started service; the parameter is its command."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [environment / "bin/emberline", *request.param, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_variables(environment))
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            try:
                urllib.request.urlopen(f"{url}/health/live", timeout=5).close()
                break
            except urllib.error.HTTPError as e:
                e.close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("url", [["router"], ["gateway"]], indirect=True, ids=["router", "gateway"])
def test_service_starts_without_torch(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        assert b"emberline:" in reply.read()
    with urllib.request.urlopen(f"{url}/", timeout=10) as reply:
        assert b"<html" in reply.read()


@pytest.mark.parametrize("command", [("serve", "smollm2"), ("worker", "smollm2"), ("cluster", "up")])
def test_engine_commands_name_missing_extra(environment: Path, command: tuple[str, ...]) -> None:
    done = run_command(environment, *command)
    assert done.returncode == 1
    assert "torch" in done.stderr and "pip install 'FILE.whl[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_lists_missing_packages(environment: Path) -> None:
    done = run_command(environment, "doctor")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "FILE.whl[cpu]" in done.stdout
