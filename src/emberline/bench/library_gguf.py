"""Our GGUF reader compared with the gguf package: CPU and memory to read a header, and damaged files.

pip install gguf==0.19.0
python -m emberline.bench.library_gguf --json benchmarks/results/library-gguf.json

The file has a vocabulary of 150,000 tokens and 280,000 merges. A damaged file is refused if the reader raises an error
within five seconds and without more than 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from emberline.bench import report as reports
from emberline.bench.report import BenchReport

LIBRARIES = ("ours", "gguf")
TOKENS, MERGES = 150_000, 280_000
MAX_CHILD_BYTES = 1 << 30  # of memory, beyond what the imports need
MAX_CHILD_S = 5.0

HEAD = b"GGUF" + struct.pack("<I", 3)


def encode_gguf_string(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def encode_array_header(element_type: int, count: int) -> bytes:
    return struct.pack("<IIQ", 9, element_type, count)


def write_vocabulary(path: Path) -> None:
    """Write a GGUF file with a large vocabulary and one small tensor."""
    tokens = b"".join(encode_gguf_string(f"token{i}") for i in range(TOKENS))
    merges = b"".join(encode_gguf_string(f"to{i} ken{i}") for i in range(MERGES))
    kinds = struct.pack(f"<{TOKENS}i", *[1] * TOKENS)
    metadata = (
        encode_gguf_string("general.architecture") + struct.pack("<I", 8) + encode_gguf_string("llama"),
        encode_gguf_string("tokenizer.ggml.tokens") + encode_array_header(8, TOKENS) + tokens,
        encode_gguf_string("tokenizer.ggml.merges") + encode_array_header(8, MERGES) + merges,
        encode_gguf_string("tokenizer.ggml.token_type") + encode_array_header(5, TOKENS) + kinds,
    )
    path.write_bytes(append_tensor(HEAD + struct.pack("<QQ", 1, len(metadata)) + b"".join(metadata)))


def append_tensor(header: bytes, shape: tuple[int, ...] = (32, 2), type_id: int = 0, offset: int = 0) -> bytes:
    info = (
        encode_gguf_string("token_embd.weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    )
    header += info + struct.pack("<IQ", type_id, offset)
    return header + bytes(-len(header) % 32) + bytes(256)


def generate_damaged_files() -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of files that a reader must refuse."""
    key = encode_gguf_string("general.architecture") + struct.pack("<I", 8) + encode_gguf_string("llama")
    good = HEAD + struct.pack("<QQ", 1, 1) + key
    yield "truncated metadata", good[:40]
    yield "truncated tensor data", append_tensor(good)[:-64]
    yield "2**62 metadata keys", HEAD + struct.pack("<QQ", 1, 2**62) + key
    yield "2**62 tensors", HEAD + struct.pack("<QQ", 2**62, 1) + key + append_tensor(b"")
    yield "string of 2**62 bytes", HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**62) + b"general"
    yield (
        "array of 2**62 numbers",
        HEAD + struct.pack("<QQ", 0, 1) + encode_gguf_string("a") + encode_array_header(4, 2**62),
    )
    yield (
        "array of 2**40 empty arrays",
        HEAD + struct.pack("<QQ", 0, 1) + encode_gguf_string("a") + encode_array_header(9, 2**40) + bytes(99),
    )
    yield (
        "arrays nested 2,000 deep",
        HEAD
        + struct.pack("<QQ", 0, 1)
        + encode_gguf_string("a")
        + struct.pack("<I", 9)
        + (struct.pack("<IQ", 9, 1) * 2000),
    )
    yield "tensor of 2**62 elements", append_tensor(good, (2**31, 2**31))
    yield "tensor past the end", append_tensor(good, offset=1 << 20)
    yield "misaligned tensor", append_tensor(good, offset=3)
    yield "key twice", append_tensor(HEAD + struct.pack("<QQ", 1, 2) + key + key)
    yield "unknown tensor type", append_tensor(good, type_id=200)
    yield "text that is not UTF-8", append_tensor(HEAD + struct.pack("<QQ", 1, 1) + key[:-5] + b"\xff\xfe\xfd\xfc\xfb")
    yield (
        "boolean of 7",
        append_tensor(HEAD + struct.pack("<QQ", 1, 2) + key + encode_gguf_string("a") + struct.pack("<IB", 7, 7)),
    )


def read_vocabulary(library: str, path: Path) -> int:
    """Read the header and the vocabulary, and return the number of tokens."""
    if library == "ours":
        from emberline.hub.gguf import GGUFFile

        with GGUFFile(path) as file:
            found: Any = file.metadata.get("tokenizer.ggml.tokens", [])
            assert all(len(file.raw_bytes(tensor)) for tensor in file.tensors.values())
            return len(found)
    from gguf import GGUFReader

    reader = GGUFReader(path)
    contents = {name: field.contents() for name, field in reader.fields.items()}
    assert all(tensor.data.nbytes for tensor in reader.tensors)
    return len(contents.get("tokenizer.ggml.tokens", []))


def peak_memory_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e3


def measure_read(library: str, path: Path, limit_memory: bool) -> dict[str, Any]:
    if library == "ours":
        import emberline.hub.gguf  # noqa: F401
    else:
        import gguf  # noqa: F401
    before = peak_memory_mb()
    if limit_memory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_CHILD_BYTES, used + MAX_CHILD_BYTES))
    started = time.process_time()
    outcome = "accepted"
    try:
        read_vocabulary(library, path)
    except MemoryError:
        outcome = "out of memory"
    except Exception as e:
        outcome = type(e).__name__
    return {"cpu_s": time.process_time() - started, "memory_mb": peak_memory_mb() - before, "outcome": outcome}


def run_child(library: str, path: Path, *, limit_resources: bool) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "emberline.bench.library_gguf",
        "--child",
        library,
        str(path),
        str(int(limit_resources)),
    ]
    limit_s = MAX_CHILD_S + 3 if limit_resources else 400
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"outcome": "hangs"}
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"outcome": "crashes"}
    return {"outcome": "hangs"} if limit_resources and found.get("cpu_s", 0) > MAX_CHILD_S else found


def run(rounds: int, folder: Path) -> BenchReport:
    path = folder / "vocabulary.gguf"
    write_vocabulary(path)
    measured: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
    for _ in range(rounds):
        for library in LIBRARIES:
            measured[library].append(run_child(library, path, limit_resources=False))
    outcomes: dict[str, dict[str, str]] = {library: {} for library in LIBRARIES}
    for name, data in generate_damaged_files():
        path.write_bytes(data)
        for library in LIBRARIES:
            outcomes[library][name] = run_child(library, path, limit_resources=True)["outcome"]
    config = {
        "rounds": rounds,
        "tokens": TOKENS,
        "merges": MERGES,
        "clock": "CPU time of the process, without imports",
        "versions": {"gguf": version("gguf")},
        "damaged_files": outcomes,
    }
    report = BenchReport("library-gguf", config)

    def add(name: str, unit: str, figure: str) -> None:
        values = {library: [float(each[figure]) for each in measured[library]] for library in LIBRARIES}
        report.add(name, values["ours"], unit, peer=median(values["gguf"]))

    add("read_header", "s", "cpu_s")
    add("memory", "MB", "memory_mb")
    wrong = ("accepted", "out of memory", "hangs", "crashes")
    not_refused = {library: sum(each in wrong for each in outcomes[library].values()) for library in LIBRARIES}
    report.add("damaged_files_not_refused", not_refused["ours"], "files", peer=not_refused["gguf"])
    return report


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        library, path, limited = sys.argv[2:5]
        print(json.dumps(measure_read(library, Path(path), limited == "1")))
        return
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("--rounds", type=int, default=3)
    reports.add_report_arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options.rounds, Path(folder)).print_and_save(options.json, options.commit)


if __name__ == "__main__":
    main()
