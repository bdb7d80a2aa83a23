"""Workloads of the simulator: arrivals follow their rates, traces are read exactly, and bad ones are named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from emberline.cli.__main__ import main
from emberline.core.errors import InvalidRequest
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.workloads.arrivals import ArrivalRate, BurstRate, ConstantRate, DiurnalRate, draw_arrivals
from emberline.sim.workloads.parse import KINDS, parse_workload
from emberline.sim.workloads.requests import RequestWorkload
from emberline.sim.workloads.traces import TraceError, read_trace

GATEWAY = [  # newest first, as the gateway exports them
    {"created_at": "2026-11-18T10:00:09.000+00:00", "tokens_in": 150, "tokens_out": 5, "session_id": "s"},
    {"created_at": "2026-11-18T10:00:04.500+00:00", "tokens_in": 0, "tokens_out": 0, "session_id": ""},
    {"created_at": "2026-11-18T10:00:00.250+00:00", "tokens_in": 100, "tokens_out": 20, "session_id": "s"},
]
MOONCAKE = [
    {"timestamp": 500, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]},
    {"timestamp": 2500, "input_length": 1100, "output_length": 3, "hash_ids": [1, 5, 6]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n50,GPT-4,417,0,417,API log\n"
)


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(tmp_path: Path, text: str, **options: Any) -> list[tuple[float, int, int]]:
    (tmp_path / "trace").write_text(text)
    return [
        (round(session.starts_at, 6), session.request.num_prompt_tokens, session.request.reply.num_tokens)
        for session in read_trace(tmp_path / "trace", **options).sessions(0)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (lines(GATEWAY), [(0.0, 100, 20), (8.75, 150, 5)]),
        (lines(MOONCAKE), [(0.0, 700, 9), (2.0, 1100, 3)]),
        (AZURE, [(0.0, 374, 44), (4.314579, 396, 109)]),
        (AZURE_2024, [(0.0, 2162, 5)]),
        (BURSTGPT, [(0.0, 472, 18), (40.0, 1087, 230)]),
    ],
)
def test_traces_are_read(tmp_path: Path, text: str, expected: list[tuple[float, int, int]]) -> None:
    assert read(tmp_path, text) == expected
    assert read(tmp_path, text, speed=2.0)[-1][0] == pytest.approx(expected[-1][0] / 2)


@pytest.mark.parametrize(("rows", "cached"), [(GATEWAY, 112), (MOONCAKE, 512)])
def test_replayed_prompts_share_what_the_trace_says(tmp_path: Path, rows: list[dict[str, Any]], cached: int) -> None:
    (tmp_path / "trace").write_text(lines(rows))
    result = SimCluster(SimClusterConfig(workers=1)).run(read_trace(tmp_path / "trace").sessions(0))
    assert result.cached_tokens == cached, "full blocks: prompt and reply of the session, or the first hash id"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        (AZURE + "2023-11-16 18:15:51,12\n", r"trace, line 4, field 'GeneratedTokens': it is missing"),
        (AZURE + "yesterday,12,3\n", r"line 4, field 'TIMESTAMP': 'yesterday' must be a date"),
        (BURSTGPT + "60,GPT-4,-4,1,1,API log\n", r"line 5, field 'Request tokens': -4 must be a whole number"),
        (BURSTGPT + "nan,GPT-4,4,1,1,API log\n", r"line 5, field 'Timestamp': 'nan' must be a number"),
        (lines(MOONCAKE) + "{not json}\n", "trace, line 3: it must be a JSON object"),
        (lines([{**MOONCAKE[0], "hash_ids": [1]}]), r"line 1, field 'hash_ids': it must be a list of at least 2 ids"),
        (BURSTGPT + "1e300,GPT-4,4,1,1,API log\n", r"requests over 1e\+300 s; a trace may have 3.16e\+07 s"),
        ("a,b\n1,2\n", "line 2: the format is unknown; its fields are: a, b"),
        (AZURE + "x" * 200_000 + ",1,2\n", "trace, line 4: it is not a row of a CSV file: field larger"),
        ('{"a":' * 100_000, "trace, line 1: it must be a JSON object"),
        (json.dumps(GATEWAY), "is a JSON list; a trace has a JSON object in each line"),
    ],
)
def test_bad_traces_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path, text)


def test_missing_trace_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing.csv cannot be read"):
        read_trace(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("rate", "busy", "quiet"),
    [
        (ConstantRate(50.0), (0.0, 50.0), (50.0, 100.0)),
        (BurstRate(20.0, factor=4.0, every_s=50.0, burst_s=10.0), (50.0, 60.0), (60.0, 70.0)),
        (DiurnalRate(50.0, peak_factor=1.8, day_s=100.0), (40.0, 60.0), (0.0, 10.0)),
    ],
)
def test_arrivals_follow_the_rate(rate: ArrivalRate, busy: tuple[float, float], quiet: tuple[float, float]) -> None:
    times = list(draw_arrivals(rate, 100.0, random.Random(1)))
    assert times == sorted(times) == list(draw_arrivals(rate, 100.0, random.Random(1)))
    for begin, end in (busy, quiet):
        expected = sum(rate.at(begin + 0.01 * i) * 0.01 for i in range(round(100 * (end - begin))))
        count = sum(begin <= time < end for time in times)
        assert abs(count - expected) < 4 * expected**0.5


def test_prompts_of_a_workload_share_their_beginning() -> None:
    workload = RequestWorkload(ConstantRate(5.0), 10.0, 100.0, 10.0, 0.5, shared_tokens=64, shared_prompts=2)
    made = [session.request for session in workload.sessions(3)]
    assert len({request.segments[0].key for request in made}) == 2
    assert len({request.num_prompt_tokens for request in made}) > len(made) // 2
    assert [request.digests for request in made] == [session.request.digests for session in workload.sessions(3)]
    assert made[0].digests != next(workload.sessions(4)).request.digests


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_workload_has_usable_defaults(kind: str) -> None:
    session = next(iter(parse_workload(f"{kind}:").sessions(0)))
    assert session.next_request().num_prompt_tokens > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:rate=0", "rate is 0; it must be above 0"),
        ("poisson:rate=fast", "rate is 'fast'; it must be a finite number"),
        ("poisson:seconds=inf", "seconds is 'inf'; it must be a finite number"),
        ("agents:turns=nan", "turns is 'nan'; it must be a finite number"),
        ("poisson:speed=3", "no setting 'speed'.*rate, seconds"),
        ("poisson:seconds=0", "seconds is 0"),
        ("bursts:burst=400", "burst is 400 s; it must be above 0 and at most every, 300 s"),
        ("diurnal:peak=3", "peak is 3; it must be from 1 to 2"),
        ("agents:sessions=0", "sessions is 0"),
        ("agents:sessions=2.5", "sessions is '2.5'; it must be a whole number"),
        ("agents:user=-5", "user is -5; it must be at least 1"),
        ("agents:spread=-1", "spread is -1; it must be from 0 to 5"),
        ("poisson:spread=1000", "spread is 1000; it must be from 0 to 5"),
        ("poisson:shared_prompts=0", "shared_prompts is 0"),
        ("poisson:rate=1,rate=2", "setting rate twice"),
        ("weekly:rate=3", "neither a file nor one of the kinds poisson, bursts"),
        ("", "the workload '' is neither a file"),
        ("poisson:prompt=1e308,spread=5", r"prompt is 1e\+308; it must be at most 2147483648"),
        ("agents:user=1e308", r"user is 1e\+308; it must be at most 2147483648"),
    ],
)
def test_bad_workloads_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_workload(text)


def test_a_kv_cache_without_a_block_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "poisson:seconds=10", "--kv-tokens", "63"]) == 1
    assert "--kv-tokens is 63; it must be at least 64" in capsys.readouterr().err
