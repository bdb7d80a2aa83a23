"""`emberline plan`: table, JSON and page of one plan, and the answers to bad input."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from emberline.cli.__main__ import main
from emberline.core.errors import InvalidRequest
from emberline.engine.gpu_set import GPU_MODELS
from emberline.planner import fleet_plan
from emberline.planner.accuracy import SimulationError
from emberline.planner.gpu_speeds import find_gpu_speed
from emberline.planner.plan_page import render_page

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
MODEL = str(CONFIGS / "llama-3.1-8b.json")
OPTIONS = {
    "--model": MODEL,
    "--gpu": "h200",
    "--traffic": "rate=4,in=300,out=10",
    "--slo": "ttft_p90=300ms,itl_p90=30ms",
    "--weights": "plain",
    "--max-gpus": "2",
}


def words(**changes: str) -> list[str]:
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return ["plan", *(word for option in options.items() for word in option)]


def error_of(capsys: pytest.CaptureFixture[str], **changes: str) -> str:
    assert main(words(**changes)) == 1
    return capsys.readouterr().err


class PageChecker(HTMLParser):
    """Counts elements, and collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []
        self.external: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)
        self.external += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("plan")
    files = {"json": str(folder / "plan.json"), "html": str(folder / "plan.html")}
    assert main(words(**files, gpu_price="2.5")) == 0
    return json.loads(Path(files["json"]).read_text()), Path(files["html"]).read_text()


def test_report(written: tuple[dict[str, Any], str]) -> None:
    report, _ = written
    best = report["candidates"][0]
    assert best["gpus"] == 1 and best["meets_slo"] and best["pools"][0]["workers"] == 1
    assert best["ttft_p50_ms"] <= best["ttft_p90_ms"] <= 300 and best["itl_p50_ms"] <= best["itl_p90_ms"] <= 30
    tokens_per_hour = 4 * 310 * 3600
    assert best["cost_per_million_tokens"] == pytest.approx(2.5e6 / tokens_per_hour, rel=1e-3)
    assert report["validate"] and {each["topology"] for each in report["candidates"]} >= set(report["validate"])
    assert [each["factor"] for each in report["sensitivity"]["traffic"]] == [0.75, 1.25]
    basis = {row["figure"]: row for row in report["basis"]}
    assert basis["step costs, plain"]["basis"] == "measured"
    assert basis["latencies of candidates"]["basis"] == "simulated" and basis["price"]["basis"] == "given"


def test_page_is_self_contained(written: tuple[dict[str, Any], str]) -> None:
    _, page = written
    checker = PageChecker()
    checker.feed(page)
    assert not checker.open and not checker.external and checker.counts["svg"] >= 5
    assert "light-dark(" in page and "script" not in checker.counts and not re.search(r"https?://|@import|url\(", page)


def test_names_of_files_are_escaped(written: tuple[dict[str, Any], str]) -> None:
    report, _ = written
    assert "<b>" not in render_page(report | {"model": "<b>.json"})


@pytest.mark.parametrize(
    ("changes", "named", "hint"),
    [
        ({"max_gpus": "0"}, "max_gpus is 0", "--max-gpus"),
        ({"gpu": "tpu"}, "'tpu'", "h200"),
        ({"gpu": "V100"}, "'V100'", "h200"),
        ({"model": "/no/such/model"}, "/no/such/model", ""),
        ({"traffic": ""}, "rate, in, out", "rate="),
        ({"traffic": "/no/such/trace"}, "neither a file", "rate="),
        ({"traffic": "rate=0,in=10,out=10"}, "rate is '0'", "rate="),
        ({"traffic": "rate=1,in=10"}, "no out", "rate="),
        ({"traffic": "rate=1,in=10,out=nan"}, "out is 'nan'", "rate="),
        ({"traffic": "rate=1,in=10,out=5,burst=3"}, "'burst'", "spread"),
        ({"traffic": "rate=1,in=500000,out=10"}, "500010 tokens", "shorter requests"),
        ({"slo": "ttft_p90=1s"}, "itl_p90", "ttft_p90="),
        ({"slo": "ttft_p90=1s,itl_p90=100us"}, "'100us'", "500ms"),
        ({"slo": "ttft_p90=1ms,itl_p90=1s"}, "cannot be reached", "raise ttft_p90"),
        ({"weights": "int3"}, "int3", "plain"),
        ({"link": "rdma"}, "'rdma'", "tcp"),
        ({"tokens_per_step": "9"}, "tokens_per_step is 9", ""),
        ({"gpu_price": "-1"}, "gpu_price is -1", ""),
        ({"start_seconds": "-1"}, "start_seconds is -1", ""),
        ({"accuracy": "/no/such.json"}, "/no/such.json", "sim-accuracy.json"),
    ],
)
def test_bad_input(changes: dict[str, str], named: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, **changes)
    assert named in message
    assert not hint or hint in message.partition("(hint: ")[2]


@pytest.mark.parametrize("option", ["json", "html"])
def test_output_that_cannot_be_written_is_refused_before_the_plan_is_computed(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the plan was computed")

    monkeypatch.setattr(fleet_plan, "plan_fleet", fail)
    assert f"--{option} is '{tmp_path}', which is a directory" in error_of(capsys, **{option: str(tmp_path)})


def test_empty_list_of_weight_formats_is_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words(weights=","))
    assert "',' names no weight format" in capsys.readouterr().err


def test_models_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, model=str(CONFIGS / "kimi-k2.5.json"), max_gpus="1", weights="auto")
    assert "fits no worker" in message and "does not fit into GPU memory" in message


def test_errors_of_the_simulator_come_from_its_result_file(tmp_path: Path) -> None:
    file = tmp_path / "sim-accuracy.json"
    results = {"ttft_p90_error_max": 0.07, "itl_p90_error_max": 0.04, "h200_itl_p90_error_max": 0.015}
    file.write_text(json.dumps({"results": {name: {"value": value} for name, value in results.items()}}))
    described = "ttft_p90 up to 7.0 %, itl_p90 up to 4.0 % (one H200: 1.5 %) (sim-accuracy.json)"
    assert SimulationError.read(file).describe() == described
    assert SimulationError().describe().startswith("unknown")
    file.write_text(json.dumps({"results": {"ttft_p90_error_max": {"value": 0.07}}}))
    with pytest.raises(InvalidRequest, match="itl_p90_error_max"):
        SimulationError.read(file)


def test_plan_states_the_measured_errors_of_the_simulator(written: tuple[dict[str, Any], str]) -> None:
    report, _ = written
    stated = next(row["error"] for row in report["basis"] if row["figure"] == "latencies of candidates")
    results = json.loads((CONFIGS.parent / "results" / "sim-accuracy.json").read_text())["results"]
    for name in ("ttft_p90_error_max", "itl_p90_error_max", "h200_ttft_p90_error_max", "h200_itl_p90_error_max"):
        assert f"{100 * results[name]['value']:.1f} %" in stated


@pytest.mark.parametrize("name", GPU_MODELS)
def test_speed_of_each_known_gpu_is_its_share_of_the_data_sheet(name: str) -> None:
    speed, measured = find_gpu_speed(name.lower()), find_gpu_speed("h200")
    gpu, reference = GPU_MODELS[name], GPU_MODELS["H200"]
    assert speed.read_bytes_s / measured.read_bytes_s == pytest.approx(gpu.read_bytes_s / reference.read_bytes_s)
    assert ("not measured" in speed.note) == (name != "H200")
    assert ("does not run" in speed.note) == (name == "MI300X")


def test_plan_for_a_gpu_that_was_not_measured_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(words(gpu="rtx-4090", slo="ttft_p90=2s,itl_p90=90ms", html=str(page), json=str(data))) == 0
    assert "The RTX4090 was not measured" in capsys.readouterr().out
    assert "<title>1 GPU (RTX4090) serves llama-3.1-8b, as 1 x plain</title>" in page.read_text()
    assert {"speed of the RTX4090", "memory"} <= {row["figure"] for row in json.loads(data.read_text())["basis"]}
