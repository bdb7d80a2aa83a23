"""`emberline autoscale`: options that would be ignored are rejected, and the documented command is parsed."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from emberline.autoscaler.settings import AutoscalerSettings
from emberline.cli import autoscale
from emberline.cli.__main__ import main

DOCUMENT = Path(__file__).parents[2] / "docs" / "autoscaling.md"
SLO = ["autoscale", "--slo", "ttft_p90=1s,itl_p90=50ms"]
COMMAND = "serve {router} {role} {name}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--namespace", "prod"], "--namespace is set, but --adapter local"),
        (["--adapter", "local", "--ray-address", "head:6379"], "--ray-address is set, but --adapter local"),
        (["--adapter", "ray", "--keep-workers"], "--keep-workers is set, but --adapter ray"),
        (["--adapter", "kubernetes", "--worker-command", COMMAND], "--worker-command is set, but --adapter kubernetes"),
        (["--adapter", "kubernetes", "llama", "--max-running", "8"], "an option of workers is set, but --adapter kube"),
        (["--pool", "both:target=deployment/x"], "pool both has a target, but only --adapter kubernetes"),
        (["--worker-command", COMMAND, "llama", "--max-running", "8"], "the options '--max-running 8' are not used"),
        (["--worker-command", COMMAND, "llama"], "the model 'llama' is not used"),
        (["--worker-command", "'serve"], "which is no shell command: No closing quotation"),
        (["--adapter", "kubernetes", "llama"], "MODEL is set, but --adapter kubernetes"),
        (["--ray-cpus", "2"], "--ray-cpus is set, but --adapter local"),
        (["--ray-cpus", "0"], "--ray-cpus is set, but --adapter local"),
        (["--adapter", "ray", "--ray-cpus", "nan"], "ray_cpus is nan; it must be at least 0"),
        (["llama", "--pool=both:max=4"], "--pool=both:max=4 comes after the model 'llama'"),
    ],
)
def test_options_that_the_adapter_ignores_are_rejected(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SLO, "--router", "http://127.0.0.1:9", *words]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_slo_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale"]) == 1
    assert "--slo is missing" in capsys.readouterr().err
    assert main(["autoscale", "smollm2", "--slo", "ttft_p90=1s,itl_p90=50ms"]) == 1
    assert "write emberline autoscale --slo .. smollm2" in capsys.readouterr().err


def test_the_port_of_the_metrics_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--metrics-port", "99999", "--logs", str(tmp_path), "--worker-command", COMMAND]
    assert main([*SLO, "--router", "http://127.0.0.1:9", *words]) == 1
    assert "(hint: choose another --metrics-port)" in capsys.readouterr().err


def test_the_command_in_the_documentation_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall("^ {4}emberline (autoscale .*)$", DOCUMENT.read_text(), re.MULTILINE)
    settings: list[AutoscalerSettings] = []

    async def record_settings(args: argparse.Namespace, found: AutoscalerSettings) -> None:
        settings.append(found)
        assert args.model == "smollm2"

    monkeypatch.setattr(autoscale, "_run", record_settings)
    assert main(line.split()) == 0
    assert settings[0].pool("both").max_workers == 4
