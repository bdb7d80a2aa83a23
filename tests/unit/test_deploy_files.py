"""Dockerfiles and systemd units: linted, without root, and with options that the commands accept."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from emberline.gateway.core.settings import ProviderSettings
from emberline.gateway.settings_store import read_configured_gateways

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def test_dockerfiles_pass_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    program = str(hadolint) if hadolint.exists() else shutil.which("hadolint")
    assert program is not None, "hadolint is missing: run scripts/setup test"
    assert len(DOCKERFILES) == 2
    done = subprocess.run([program, *DOCKERFILES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_have_a_fixed_base_and_no_root(path: Path) -> None:
    lines = path.read_text().splitlines()
    (base,) = (line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE="))
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base)
    last_stage = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001:10001" in last_stage and 'ENTRYPOINT ["emberline"]' in last_stage
    assert not any("pip" in line for line in last_stage if not line.startswith("#")), "only the build stage runs pip"


def test_constraints_pin_what_pyproject_does_not() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    pinned = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    own = {each.partition("==")[0].lower().replace("_", "-") for each in pinned if "==" in each}
    lines = (DEPLOY / "docker/constraints.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines if not line.startswith("#"))
    assert not own & set(names) and {"torch", "setuptools"} <= set(names)


def test_units_pass_systemd_analyze(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    files = []
    for unit in UNITS:
        file = tmp_path / unit.name.replace("@", "@decode")
        file.write_text(unit.read_text().replace("/opt/emberline/bin/emberline", "/bin/true"))
        files.append(str(file))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_commands_with_valid_options(path: Path) -> None:
    text = path.read_text()
    (command,) = re.findall(r"^ExecStart=/opt/emberline/bin/emberline (.+)$", text, re.MULTILINE)
    name = command.split()[0]
    example = (DEPLOY / f"systemd/{name}.env.example").read_text()
    variables = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', example, re.MULTILINE))
    keys = {variable: value for variable, value in variables.items() if variable.endswith("_KEY")}
    assert keys and not any(keys.values()), "a key of the example, which everyone knows, would be used"
    assert not any(variable in command for variable in keys), "users of the host see arguments"
    for variable, value in variables.items():
        command = command.replace(f"${{{variable}}}", value).replace(f"${variable}", value)
    assert "$" not in command
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"emberline.cli.{name}").add_arguments(parser)
    parser.parse_args(shlex.split(command)[1:])
    assert ("DynamicUser=yes" in text or "User=emberline" in text) and "NoNewPrivileges=yes" in text
    assert re.search("^(Group|SupplementaryGroups)=emberline$", text, re.MULTILINE), "it cannot read TLS files"


def test_configuration_file_in_the_docs_starts_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DEPLOY.parent / "docs" / "gateway.md").read_text()
    (sample,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    gateways = read_configured_gateways(tomllib.loads(sample), ProviderSettings(base_url="http://127.0.0.1:8000"))
    assert gateways["default", "default"].authentication is True
    assert not {"store", "redis"} & tomllib.loads(sample).keys(), "these need servers that a reader does not have"
