"""LatencyTargets: the text of --slo."""

from __future__ import annotations

import pytest

from emberline.core.errors import InvalidRequest
from emberline.core.slo import LatencyTargets


@pytest.mark.parametrize(
    "text", ["ttft_p90=0.5,itl_p90=0.05", "itl_p90=50ms, ttft_p90=500ms", "ttft_p90=.5s,itl_p90=0.05s"]
)
def test_seconds_and_milliseconds(text: str) -> None:
    assert LatencyTargets.parse(text) == LatencyTargets(0.5, 0.05)
    assert LatencyTargets.parse(str(LatencyTargets.parse(text))) == LatencyTargets(0.5, 0.05)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "ttft_p90 and no itl_p90"),
        ("ttft_p90=0.5", "itl_p90"),
        ("ttft_p90=0.5,itl_p90=0", "itl_p90 is '0'"),
        ("ttft_p90=500,itl_p90=500", "itl_p90 is '500'"),  # milliseconds without their unit
        ("ttft_p90=-1,itl_p90=0.05", "ttft_p90 is '-1'"),
        ("ttft_p90=1e3,itl_p90=0.05", "ttft_p90 is '1e3'"),
        ("ttft_p90=nan,itl_p90=0.05", "ttft_p90 is 'nan'"),
        ("ttft_p95=1,itl_p90=0.05", "'ttft_p95'"),
        ("ttft_p90=1,ttft_p90=2,itl_p90=0.05", "twice"),
    ],
)
def test_bad_targets_are_named(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        LatencyTargets.parse(text)
    assert named in raised.value.message and raised.value.hint and raised.value.param == "slo"
