"""Measures decode attention of one layer of Llama 3.1 8B with every possible part size.

The kernel splits each sequence into parts, and the module `worklist` chooses the part size from an estimate of the
time. The estimate is fitted to these measurements, which are stored in tests/unit/worklist_timings.json. Run it with
`python -m emberline.bench.gpu.worklist_sweep FILE`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from emberline.bench.gpu.decode import MIN_LAYERS, UNEVEN_LENGTHS, DecodeInputs, count_bytes_read
from emberline.bench.gpu.timing import count_input_sets, time_graph_replay
from emberline.kernels import worklist

# length of each row: numbers of rows
BATCHES = {640: (1, 8, 16, 32, 64, 128, 256), 2000: (32, 64, 128), 4131: (1, 4, 8, 16, 32, 48, 64, 72, 96)}
BATCHES |= {4200: (56,), 30_000: (1, 4)}
MAX_PARTS = 2500  # parts of all rows together
REPLAYS = 5


def sequence_lengths_by_case() -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    chat = np.clip(rng.lognormal(5.4, 1.0, 600), 20, 4000).astype(int).tolist()
    even = {f"{rows}x{length}": [length] * rows for length, counts in BATCHES.items() for rows in counts}
    mixed = rng.integers(100, 8000, 40).tolist()
    return even | {"uneven": UNEVEN_LENGTHS, "chat600": chat, "chat200": chat[:200], "40mixed": mixed}


def measure_part_sizes(lengths: list[int]) -> dict[int, float]:
    """Return the microseconds of attention for each possible part size."""
    layers = DecodeInputs(
        lengths, torch.bfloat16, max(MIN_LAYERS, count_input_sets(count_bytes_read(lengths, torch.bfloat16)))
    )
    tiles = -(-np.array(lengths) // worklist.TILE_KEYS)
    sizes = (size for size in worklist.PART_SIZES if size <= 2 * tiles.max())
    likely = [size for size in sizes if int((-(-tiles // size)).sum()) <= MAX_PARTS]
    return {
        size: round(time_graph_replay(layers.make_attention_calls(tiles_per_part=size), replays=REPLAYS), 2)
        for size in likely
    }


def keep_shorter_times(old: dict[str, float], new: dict[int, float]) -> dict[str, float]:
    """Return the shorter time of two runs for each part size, because disturbances only add time."""
    return {str(size): min(us, old.get(str(size), us)) for size, us in new.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON file of timings, updated where a time is less")
    file = parser.parse_args().file
    before = json.loads(file.read_text("utf-8")) if file.exists() else {}
    lines = []
    for name, lengths in sequence_lengths_by_case().items():
        us = keep_shorter_times(before.get(name, {}).get("us", {}), measure_part_sizes(lengths))
        lines.append(f" {json.dumps(name)}: {json.dumps({'rows': [*Counter(lengths).items()], 'us': us})}")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
