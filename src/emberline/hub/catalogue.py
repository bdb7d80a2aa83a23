"""The catalogue of short model names, such as qwen3-0.6b, and the repositories that they stand for.

NAME                the GGUF model, or the safetensors model if the entry has no other
NAME:safetensors    the safetensors model
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CATALOGUE_FILE = Path(__file__).with_name("catalogue.toml")
SAFETENSORS_TAG = ":safetensors"
BYTES_PER_PARAMETER = 2  # in bfloat16
MAX_SUGGESTIONS = 3
MEMORY_CLASSES_GB = (4, 8, 16, 24, 32, 48, 80, 141)
# Of a machine's memory that is left for the weights, beside the KV cache, the process and other programs.
WEIGHTS_SHARE, OTHER_MEMORY_GB = 0.9, 2.0
NAMES_PER_MEMORY_CLASS = 4


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    parameters: float
    context: int  # tokens
    licence: str
    safetensors: str  # repository of the Hugging Face hub
    gguf: str = ""  # repository, and the quantisation if it has several; "": there is none
    gguf_gb: float = 0.0
    safetensors_gb: float = 0.0  # 0: two bytes for each parameter

    @property
    def source(self) -> str:
        """The model that the name stands for, as resolve_model takes it."""
        return f"hf:{self.gguf or self.safetensors}"

    @property
    def download_gb(self) -> float:
        return self.gguf_gb or self.full_gb

    @property
    def full_gb(self) -> float:
        """The size of the safetensors model, and of its weights in a GPU's memory."""
        return self.safetensors_gb or self.parameters * BYTES_PER_PARAMETER / 1e9


@cache
def load_catalogue() -> dict[str, CatalogueEntry]:
    """Return the entries by name, the smallest models first."""
    with CATALOGUE_FILE.open("rb") as file:
        entries = [CatalogueEntry(name, **fields) for name, fields in tomllib.load(file).items()]
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.parameters)}


def find_source(name: str) -> str | None:
    """Return the source of a short name, as resolve_model takes it, or None if the catalogue does not have it.

    Upper and lower case are equal, and Ollama's tag `:latest` is ignored.
    """
    plain = name.lower().removesuffix(":latest")
    entry = load_catalogue().get(plain.removesuffix(SAFETENSORS_TAG))
    if entry is None:
        return None
    return f"hf:{entry.safetensors}" if plain.endswith(SAFETENSORS_TAG) else entry.source


def suggest_names(name: str, others: tuple[str, ...] = ()) -> list[str]:
    """Return the short names that are most similar to a misspelt one. `others`: further names to choose from."""
    return difflib.get_close_matches(name.lower(), [*load_catalogue(), *others], MAX_SUGGESTIONS, cutoff=0.6)


def render_catalogue_table() -> Iterator[str]:
    """Yield the lines of the table in docs/models.md."""
    yield "| name | parameters | download | weights in memory: CPU | GPU | context | licence |"
    yield "|---|---|---|---|---|---|---|"
    for entry in load_catalogue().values():
        billions = f"{entry.parameters / 1e9:.1f} B"
        sizes = " | ".join(f"{size:.1f} GB" for size in (entry.download_gb, entry.download_gb, entry.full_gb))
        yield f"| `{entry.name}` | {billions} | {sizes} | {entry.context:,} | {entry.licence} |"


def render_memory_table() -> Iterator[str]:
    """Yield the lines of the table "which model for which memory" in docs/models.md."""
    yield "| memory | on a CPU: `NAME` | on one GPU: `NAME:safetensors` |"
    yield "|---|---|---|"
    for memory_gb in MEMORY_CLASSES_GB:
        cells = (
            _list_largest_names(memory_gb, lambda entry: entry.download_gb if entry.gguf else entry.full_gb),
            _list_largest_names(memory_gb, lambda entry: entry.full_gb),
        )
        yield f"| {memory_gb} GB | {' | '.join(cells)} |"


def _list_largest_names(memory_gb: float, weights_gb: Callable[[CatalogueEntry], float]) -> str:
    """Return the names of the largest models whose weights fit, the largest first."""
    available = (memory_gb - OTHER_MEMORY_GB) * WEIGHTS_SHARE
    fitting = [entry for entry in load_catalogue().values() if weights_gb(entry) <= available]
    fitting.sort(key=weights_gb, reverse=True)
    return ", ".join(f"`{entry.name}`" for entry in fitting[:NAMES_PER_MEMORY_CLASS])
