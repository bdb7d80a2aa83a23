"""Preloading of files before torch is imported, the record for the next start, and the warm-up request."""

from __future__ import annotations

import json
import linecache
import mmap
import os
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import pytest
import tiny
import torch
from gpu_settings import gpu_config

from emberline.bench.gpu import cold
from emberline.core.engine_config import SchedulerConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine import preload
from emberline.engine.engine import Engine
from emberline.engine.gpu import boot
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.models.loader import load_decoder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.current_backend()  # is in the shared cache: to compile it for an empty one takes half a minute
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path / "cache"))


def test_near_ranges_are_merged() -> None:
    gap = preload.MAX_GAP_BYTES
    assert preload.merge_ranges([]) == []
    assert preload.merge_ranges([(0, 10), (10, 20), (15, 18), (19 + gap, 30 + gap), (31 + 2 * gap, 32 + 2 * gap)]) == [
        (0, 30 + gap),
        (31 + 2 * gap, 32 + 2 * gap),
    ]


def test_only_present_pages_are_recorded() -> None:
    size, there = mmap.PAGESIZE, 1 << 63
    far = preload.MAX_GAP_BYTES // size + 2
    states = array("Q", [0, there | 5, there, *([3] * far), there])
    assert preload._present_ranges(states, 8 * size) == [(9 * size, 11 * size), ((11 + far) * size, (12 + far) * size)]


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux")
def test_used_pages_are_recorded(tmp_path: Path) -> None:
    size, file = mmap.PAGESIZE, tmp_path / "library"
    pages = 3 * preload.MAX_GAP_BYTES // size
    file.write_bytes(os.urandom(2 * pages * size))
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as memory:
        memory.madvise(mmap.MADV_RANDOM)
        assert memory[pages * size] >= 0
        preload.write_file_record()
    note = preload.read_file_record()
    assert any(begin <= pages * size < end for begin, end in note[str(file)])
    assert sum(end - begin for begin, end in note[str(file)]) < file.stat().st_size
    module, size = Path(preload.__file__), Path(preload.__file__).stat().st_size
    compiled = Path(preload.__cached__)
    assert note[str(module)] == ([] if compiled.is_file() else [(0, size)])
    assert not compiled.is_file() or note[str(compiled)] == [(0, compiled.stat().st_size)]
    assert note[str(module.parent)] == []  # a directory that was searched
    before = preload._record_path().stat().st_mtime_ns
    preload.write_file_record()  # the record is current
    assert preload._record_path().stat().st_mtime_ns == before
    file.write_bytes(b"another")
    preload.write_file_record()
    assert str(file) not in preload.read_file_record()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": [1, [[2]]]}', "null"])
def test_damaged_record_is_ignored(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = preload.__file__
    monkeypatch.setattr(preload, "files_in_use", lambda: {module: [(0, 9)]})  # to find them takes half a second
    preload._record_path().parent.mkdir(parents=True)
    preload._record_path().write_text(text)
    assert preload.read_file_record() == {}
    preload.write_file_record()
    assert preload.read_file_record() == {module: [(0, 9)]}


def test_preload_needs_no_torch_and_uses_the_record(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model", shards=2)
    preload._record_path().parent.mkdir(parents=True)
    preload._record_path().write_text(
        json.dumps({"/nowhere": (5, [(0, 5)]), __file__: (1, [(0, 100)]), preload.__file__: (1, [])})
    )
    code = f"""
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from pathlib import Path
from emberline.engine import preload
with preload.start_preload(Path({str(directory)!r})) as reader:
    assert reader.wait_for_prefetch(0) and len(preload.read_file_record()) == 3
    while (chunk := reader.next_chunk(10)) is not None:
        reader.release_chunk(chunk)
    print(reader.stats.bytes)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(preload.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def test_read_sources_and_replaced_modules_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Path(preload.__file__)
    linecache.getlines(str(module))
    monkeypatch.setitem(sys.modules, "emberline.engine.pacing", object())  # type: ignore[misc]
    found = preload.files_in_use()
    assert found[str(module)] == [(0, module.stat().st_size)]
    assert str(module.with_name("pacing.py")) in found


def test_torch_imports_without_unused_modules() -> None:
    """Measured by the benchmark, which reads nothing in parallel and reports what was read from disk."""
    measured = cold._run_child("import", Path(), {"preload_recorded_files": False}, 120)
    assert measured["ready"] > measured["entered"] and measured["first_files"] < 10
    assert measured["read_bytes"] >= 0 and measured["major_faults"] >= 0
    assert any("torch" in file for file in measured["not_noted"])  # neither cache nor record exist


def test_warm_up_leaves_no_state(tmp_path: Path) -> None:
    model = load_decoder(tiny.write(tmp_path), "bfloat16")
    c = model.config

    def tokens(*, warm: bool) -> list[int]:
        cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 8, torch.bfloat16), 8)
        settings = gpu_config(max_running=2, max_batch_tokens=64)
        runner = GPURunner(
            model, cache, frozenset(), SamplingStateFactory(frozenset(), None), settings, HostDevice(), 64
        )
        if warm:
            thread = threading.Thread(target=boot.warm_up, args=(runner,))
            thread.start()
            thread.join()
            assert not cache.keys.any() and not cache.values.any()
        config = SchedulerConfig(block_size=8, max_batch_tokens=64, max_running=2, max_context=64)
        engine, out = Engine(config, runner), list[int]()
        engine.add(Submission("r", list(range(3, 23)), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
        while len(out) < 6:
            for output in engine.step():
                assert output.error is None
                out += output.tokens
        return out

    assert tokens(warm=True) == tokens(warm=False)
