"""`emberline autoscale`: options that the adapter would ignore are rejected."""

from __future__ import annotations

import pytest

from emberline.cli.__main__ import main

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
    ],
)
def test_options_that_the_adapter_ignores_are_rejected(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SLO, "--router", "http://127.0.0.1:9", *words]) == 1
    assert message in capsys.readouterr().err
