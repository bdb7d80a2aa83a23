"""One shape for every result, its table, and the plot made from it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from emberline.bench import machine, start
from emberline.bench.plot import draw_plot, make_panels
from emberline.bench.report import BenchReport, BenchResult, current_command, format_table, round_significant
from emberline.cli import bench
from emberline.cli.__main__ import main
from emberline.core.errors import InvalidRequest

SVG = "{http://www.w3.org/2000/svg}"


def report() -> BenchReport:
    made = BenchReport("cpu", {"model": "tiny"})
    made.add("decode_1", [40.0, 44.0, 42.0], "tok/s", peer=21.0, limit=84.0)
    made.add("decode_1/one", [20.0, 21.0], "tok/s")
    made.add("decode_1/two", 12.5, "tok/s")
    made.add("ready", 2.0, "s", peer=100.0)
    return made


def test_better_is_higher_for_rates_and_lower_for_the_rest() -> None:
    rate, time = BenchResult(42.0, "tok/s", peer=21.0, limit=84.0), BenchResult(2.0, "s", peer=100.0, limit=1.0)
    assert (rate.peer_ratio, rate.limit_share) == (2.0, 0.5)
    assert (time.peer_ratio, time.limit_share) == (50.0, 0.5)
    assert BenchResult(1.0, "s").peer_ratio is None


def test_rounds_become_a_median_with_its_spread() -> None:
    assert report().results["decode_1"] == BenchResult(42.0, "tok/s", 21.0, 84.0, (40.0, 44.0))


def test_the_last_line_and_the_file_are_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "result.json"
    report().print_and_save(file)
    lines = capsys.readouterr().out.splitlines()
    whole = json.loads(lines[-1])
    assert whole == json.loads(file.read_text())
    assert set(whole) == {"bench", "command", "commit", "hardware", "software", "config", "results"}
    assert whole["results"]["decode_1"] == {
        "value": 42,
        "unit": "tok/s",
        "peer": 21,
        "limit": 84,
        "spread": [40, 44],
    }
    row = next(line for line in lines if line.startswith("decode_1 "))
    assert row.split() == ["decode_1", "42", "tok/s", "40..44", "21", "2.00x", "84", "50%"]


@pytest.mark.parametrize(
    "started,typed",
    [
        ("/x/bin/emberline", "emberline cpu --json 'a b'"),
        ("/x/emberline/cli/__main__.py", "emberline cpu --json 'a b'"),
        ("/x/emberline/bench/gpu/__main__.py", "python -m emberline.bench.gpu cpu --json 'a b'"),
        ("/x/measure.py", "measure.py cpu --json 'a b'"),
    ],
)
def test_the_command_is_as_it_was_typed(started: str, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [started, "cpu", "--json", "a b"])
    assert current_command() == typed


def test_columns_are_aligned() -> None:
    lines = format_table(report().results).splitlines()
    assert len({line.index("tok/s") for line in lines if "tok/s" in line}) == 1


def test_the_machine_is_told() -> None:
    hardware = machine.describe_hardware()
    assert hardware["cores"] >= 1 and hardware["memory_gib"] > 0
    assert machine.describe_commit()
    assert round_significant(0.123456789) == 0.12346
    assert round_significant(1234567.0) == 1234600


def git(directory: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", directory, *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tracked(tmp_path: Path) -> Path:
    """A file in a repository with one commit."""
    git(tmp_path, "init", "-q")
    file = tmp_path / "machine.py"
    file.write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return file


def test_the_commit_is_marked_when_there_is_more_than_it(tracked: Path) -> None:
    head = git(tracked.parent, "rev-parse", "--short=12", "HEAD").strip()
    assert machine.describe_commit(source_file=tracked) == head
    (tracked.parent / "new.py").touch()
    assert machine.describe_commit(source_file=tracked) == f"{head}-dirty"
    (tracked.parent / "new.py").unlink()
    tracked.write_text("two")
    assert machine.describe_commit(source_file=tracked) == f"{head}-dirty"


def test_a_copy_that_cannot_be_compared_is_not_called_clean(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = machine._command_output
    monkeypatch.setattr(machine, "_command_output", lambda *words: None if "status" in words else output(*words))
    assert machine.describe_commit(source_file=tracked).endswith("-dirty")


def test_no_repository_and_anothers_have_no_commit_of_ours(
    tracked: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert machine.describe_commit(source_file=tmp_path_factory.mktemp("plain") / "machine.py") == "none"
    ours = tracked.parent / "site-packages" / "machine.py"
    ours.parent.mkdir()
    ours.touch()
    assert machine.describe_commit(source_file=ours) == "none"


def test_what_the_user_states_is_recorded_as_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "bench", lambda *_: report())
    file = tmp_path / "result.json"
    assert main(["bench", "start", "--commit", "1740b87", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["commit"] == "1740b87 (stated)"


@pytest.mark.parametrize("what", ["cpu", "serve", "soak", "overhead", "start"])
def test_every_bench_takes_a_commit(what: str) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert parser.parse_args([what, "--commit", "abc"]).commit == "abc"
    assert parser.parse_args([what]).commit is None


def test_a_panel_holds_ours_first_and_the_best_peer_next() -> None:
    found = {panel.title: panel for panel in make_panels(report().as_dict()["results"])}
    assert set(found) == {"decode 1"}  # `ready` has no one beside it here
    assert [name for name, _, _ in found["decode 1"].bars] == ["emberline", "one", "two"]


def test_the_plot_is_an_svg_with_a_bar_for_each_figure(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(report().as_dict()))
    draw_plot([file, file], tmp_path / "out.svg")
    root = ET.parse(tmp_path / "out.svg").getroot()
    widths = [float(r.get("width", "0")) for r in root.iter(f"{SVG}rect") if "%" not in r.get("width", "")]
    assert len(widths) == 6
    assert widths[0] / widths[1] == pytest.approx(42.0 / 20.5, rel=0.01)
    words = "".join(t.text or "" for t in root.iter(f"{SVG}text"))
    assert "limit 84" in words and "tiny" in words


@pytest.mark.parametrize("text", ["", "[]", '{"bench": "x"}'])
def test_what_is_not_a_result_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"bad\.json is not a result"):
        draw_plot([file], tmp_path / "out.svg")
