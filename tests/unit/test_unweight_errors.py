"""Errors of the `unweight` commands: changing files, unwritable targets, signals.

Each gives a message of one line and leaves no partial output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import unweight_models

from emberline.cli import options
from emberline.cli.__main__ import main
from emberline.core.config import ServerConfig
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest, ModelError, ModelFileError
from emberline.hub.source import resolve_model
from emberline.kernels.cpu import library
from emberline.unweight import model
from emberline.unweight.codec import select_weight_codec


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"another's")
    os.utime(path, (0, 0))


def replace(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [truncate, overwrite, replace])
def test_file_changed_while_packing(tmp_path: Path, change: Callable[[Path], None]) -> None:
    source = unweight_models.write(tmp_path / "m")
    done: list[int] = []

    def advance(count: int) -> None:
        done.append(count)
        if len(done) == 1:
            change(source / "model.safetensors")

    with pytest.raises(ModelFileError, match="changed while it was read"):
        model.pack_model(source, tmp_path / "packed", select_weight_codec(None), advance)
    assert done and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_model_without_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = unweight_models.save(tmp_path / "m", {})
    assert main(["unweight", "pack", str(source), str(tmp_path / "packed")]) == 1
    assert "have no tensors" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_empty_tensor_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = unweight_models.save(tmp_path / "m", {"none": np.empty((0, 4), np.uint16)})
    assert main(["unweight", "pack", str(source), str(tmp_path / "packed"), "--quiet"]) == 0
    assert main(["unweight", "info", str(tmp_path / "packed")]) == 0
    assert ", 0.0% saved" in capsys.readouterr().out


def test_write_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, packed = unweight_models.write(tmp_path / "m"), tmp_path / "packed"
    assert main(["unweight", "pack", str(source), str(packed), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["unweight", "info", str(packed), "--svg", str(tmp_path / "none" / "x.svg")]) == 1
    reason = f"--svg is '{tmp_path}/none/x.svg', but the directory {tmp_path}/none is missing"
    assert capsys.readouterr().err == f"emberline: {reason} (hint: create it, or correct the path)\n"
    assert main(["unweight", "pack", str(source), str(tmp_path / ("x" * 300))]) == 1
    assert "File name too long" in capsys.readouterr().err


def test_uncopyable_file_is_named(tmp_path: Path) -> None:
    source = unweight_models.write(tmp_path / "m")
    os.mkfifo(source / "pipe")
    with pytest.raises(ModelError, match=r"cannot create .*packed: .*pipe"):
        model.pack_model(source, tmp_path / "packed", select_weight_codec(None), lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_slow_codec_warning_without_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "find_library", lambda: None)
    assert main(["unweight", "pack", str(unweight_models.write(tmp_path / "m")), str(tmp_path / "packed")]) == 0
    assert "so this is slow" in capsys.readouterr().err


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("smollm2", str(tmp_path / ("x" * 300))):
        with pytest.raises(ModelError, match="cannot get") as caught:
            resolve_model(name, tmp_path / "file", show_progress=False)
        assert "EMBERLINE_CACHE" in str(caught.value)


SLOW = """
import sys, time
from emberline.cli.__main__ import main
from emberline.hub.progress import DownloadProgress

def add_bytes(self, byte_count):
    print("some", flush=True)
    time.sleep(60)

DownloadProgress.add_bytes = add_bytes
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_interrupt_removes_partial_output(tmp_path: Path, number: signal.Signals) -> None:
    command = ["unweight", "pack", str(unweight_models.write(tmp_path / "m")), str(tmp_path / "packed")]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "some\n"
    process.send_signal(number)
    assert process.wait(30) == 130
    process.stdout.close()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("text", ["", "G", "1e999", "-1", "nan", "5x"])
def test_invalid_memory_sizes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", f"--kv-memory={text}"])
    assert "is not a size in bytes" in capsys.readouterr().err


def test_memory_sizes() -> None:
    assert [options.parse_size(text) for text in ("0", "7", "2k", "1.5G", "1T")] == [0, 7, 2048, 3 << 29, 1 << 40]


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": -3},
        {"kv_memory": 0},
        {"kv_host_memory": -1},
        {"kv_disk": "d", "kv_disk_size": 0},
        {"max_running": 0},
    ],
)
def test_invalid_engine_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="at least"):
        EngineConfig.build("m", **settings)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_zero_timeout_is_refused(seconds: float) -> None:
    for name in ("request_timeout", "stall_timeout"):
        with pytest.raises(InvalidRequest, match=name):
            ServerConfig(**{name: seconds})  # type: ignore[arg-type]
