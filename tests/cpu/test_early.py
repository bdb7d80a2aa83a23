"""What a start does before torch is there, what it notes for the next one, and the request it warms up with."""

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

from emberline.bench.gpu import cold
from emberline.core.config import GPUConfig, SchedulerConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine import early
from emberline.engine.engine import Engine
from emberline.engine.gpu import boot
from emberline.engine.gpu.device import Host
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.sampler import RowMaker
from emberline.kv.cache import KVCache, KVShape
from emberline.models.loader import load


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path / "cache"))


def test_joins_what_lies_near() -> None:
    gap = early.GAP
    assert early.joined([]) == []
    assert early.joined([(0, 10), (10, 20), (15, 18), (19 + gap, 30 + gap), (31 + 2 * gap, 32 + 2 * gap)]) == [
        (0, 30 + gap),
        (31 + 2 * gap, 32 + 2 * gap),
    ]


def test_pages_that_are_there() -> None:
    size, there = mmap.PAGESIZE, 1 << 63
    far = early.GAP // size + 2
    states = array("Q", [0, there | 5, there, *([3] * far), there])
    assert early._present(states, 8 * size) == [(9 * size, 11 * size), ((11 + far) * size, (12 + far) * size)]


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux")
def test_notes_the_pages_it_used(tmp_path: Path) -> None:
    size, file = mmap.PAGESIZE, tmp_path / "library"
    pages = 3 * early.GAP // size
    file.write_bytes(os.urandom(2 * pages * size))
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as memory:
        memory.madvise(mmap.MADV_RANDOM)
        assert memory[pages * size] >= 0
        early.remember()
    note = early.noted()
    assert any(begin <= pages * size < end for begin, end in note[str(file)])
    assert sum(end - begin for begin, end in note[str(file)]) < file.stat().st_size
    module, size = Path(early.__file__), Path(early.__file__).stat().st_size
    compiled = Path(early.__cached__)
    assert note[str(module)] == ([] if compiled.is_file() else [(0, size)])
    assert not compiled.is_file() or note[str(compiled)] == [(0, compiled.stat().st_size)]
    assert note[str(module.parent)] == []  # searched
    before = early._note().stat().st_mtime_ns
    early.remember()  # it still holds
    assert early._note().stat().st_mtime_ns == before
    file.write_bytes(b"another")
    early.remember()
    assert str(file) not in early.noted()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": [1, [[2]]]}', "null"])
def test_a_spoiled_note_is_none(text: str) -> None:
    early._note().parent.mkdir(parents=True)
    early._note().write_text(text)
    assert early.noted() == {}
    early.remember()
    assert early.noted()


def test_begins_without_torch_and_with_a_note(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model", shards=2)
    early._note().parent.mkdir(parents=True)
    early._note().write_text(
        json.dumps({"/nowhere": (5, [(0, 5)]), __file__: (1, [(0, 100)]), early.__file__: (1, [])})
    )
    code = f"""
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from pathlib import Path
from emberline.engine import early
with early.begin(Path({str(directory)!r})) as reader:
    assert reader.wait_first(0) and len(early.noted()) == 3
    while (piece := reader.take(10)) is not None:
        reader.give_back(piece)
    print(reader.stats.bytes)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(early.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def test_notes_sources_that_were_read_and_modules_that_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Path(early.__file__)
    linecache.getlines(str(module))
    monkeypatch.setitem(sys.modules, "emberline.engine.pacing", object())  # type: ignore[misc]
    found = early.touched()
    assert found[str(module)] == [(0, module.stat().st_size)]
    assert str(module.with_name("pacing.py")) in found


def test_the_import_alone() -> None:
    """By the bench: nothing reads beside it, and it says what came from the disk."""
    said = cold._child("import", Path(), {"noted": False}, 120)
    assert said["ready"] > said["entered"] and said["first_files"] < 10
    assert said["read_bytes"] >= 0 and said["major_faults"] >= 0
    assert any("torch" in file for file in said["not_noted"])  # the cache is empty, and so is the note


def test_a_warm_up_leaves_nothing_behind(tmp_path: Path) -> None:
    model = load(tiny.write(tmp_path), "bfloat16")
    c = model.config

    def tokens(*, warm: bool) -> list[int]:
        cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 8, torch.bfloat16), 8)
        settings = GPUConfig(max_running=2, max_batch_tokens=64)
        runner = GPURunner(model, cache, frozenset(), RowMaker(frozenset(), None), settings, Host(), 64)
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
