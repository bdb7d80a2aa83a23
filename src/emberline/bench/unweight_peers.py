"""Measures other compressors on the same bytes as our weight codec, each in its own process.

A compressor that is missing or crashes is left out. `scripts/bench-peers` installs the compressors into a separate
Python environment; without that environment the current one is used.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

PEERS = ("zstd-1", "zstd-3", "zipnn")
SECONDS = 300
CodecFigures = dict[str, list[float]]  # encode and decode in GB/s, bits per weight


def measure_peer(name: str, data: bytes, rounds: int, peers_dir: Path) -> CodecFigures | None:
    python = peers_dir / "codecs" / "bin" / "python"
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        command = [str(python) if python.exists() else sys.executable, __file__, name, file.name, str(rounds)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        found: CodecFigures = json.loads(done.stdout.splitlines()[-1])
        return found


def _zstd_functions(level: int) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    zstandard: Any = import_module("zstandard")
    return zstandard.ZstdCompressor(level).compress, zstandard.ZstdDecompressor().decompress


def _zipnn_functions() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    codec: Any = import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    return (lambda data: codec.compress(bytearray(data))), (lambda data: codec.decompress(data))


def main(peer_name: str, file: str, rounds: int) -> None:
    data = Path(file).read_bytes()
    compress, decompress = _zipnn_functions() if peer_name == "zipnn" else _zstd_functions(int(peer_name.split("-")[1]))
    found: CodecFigures = {"encode": [], "decode": [], "bits": []}
    for _ in range(rounds):
        began = time.perf_counter()
        packed = compress(data)
        middle = time.perf_counter()
        back = decompress(packed)
        ended = time.perf_counter()
        assert bytes(back) == data
        found["encode"].append(len(data) / (middle - began) / 1e9)
        found["decode"].append(len(data) / (ended - middle) / 1e9)
        found["bits"].append(16 * len(packed) / len(data))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
