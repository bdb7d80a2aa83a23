"""Reads files into memory before a process that uses a GPU imports torch.

A cold start waits for the disk three times: for libraries, whose pages are read when they are first touched; for
Python's files; and for the weights. Libraries and Python files are read in small pieces, and each piece waits long
while the disk is busy with weights. So every start records which parts of which files it used. The next start first
reads those parts, many at once, then lets a second process read the weights, and imports from memory. A missing or
outdated record costs only time. This module needs only the standard library."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import linecache
import mmap
import os
import sys
import threading
import types
from array import array
from importlib.util import cache_from_source
from pathlib import Path

from emberline.core.config import cache_dir
from emberline.hub.checkpoint import Checkpoint
from emberline.models.child_reader import start_reader
from emberline.models.reader import FileReader, weight_file_paths

MAX_PRELOAD_WAIT_S = 5.0  # for reading the recorded files
MAX_GAP_BYTES = 256 << 10  # ranges of a file with a smaller gap are read as one
PAGE_PRESENT_BIT = 63  # bit in /proc/self/pagemap of a page that is in memory
MAX_RECORDED_BYTES = 4 << 30  # a larger record would cost more time than it saves

RECORD_VERSION = 2  # of the record's format

FileRange = tuple[int, int]  # [begin, end) of a file


def start_preload(model: Path) -> FileReader:
    """Start reading the checkpoint and torch's files, and create a CUDA context; return the file reader.

    A later import of torch finds its files in memory, if an earlier start recorded them and the disk is fast enough."""
    reader = start_reader(weight_file_paths(Checkpoint.open(model)), recorded_file_ranges())
    threading.Thread(target=_create_gpu_context, name="device", daemon=True).start()
    reader.wait_for_prefetch(MAX_PRELOAD_WAIT_S)
    return reader


def skip_unused_torch_imports() -> None:
    """Make the import of torch skip modules that the engine does not need.

    torch._meta_registrations takes a third of the import time. The search for backends of other vendors' devices opens
    files of every installed package."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    sys.modules.setdefault("torch._meta_registrations", types.ModuleType("torch._meta_registrations"))


def read_file_record() -> dict[str, list[FileRange]]:
    """Return the parts of each file that an earlier start of this Python used; {} if there is no record.

    The files are not checked for changes, because on a cold disk the check alone would take long."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        note = json.loads(_record_path().read_text())
        return {path: [(begin, end) for begin, end in spans] for path, (_, spans) in note.items()}
    return {}


def recorded_file_ranges() -> list[tuple[str, int, int]]:
    """Return the recorded ranges as (file, begin, end). A file that was only opened has (0, 0)."""
    return [(path, begin, end) for path, spans in read_file_record().items() for begin, end in (spans or [(0, 0)])]


def write_file_record() -> None:
    """Record the files that this process used, for the next start, unless the record is up to date.

    Call this after everything that a start loads is loaded."""
    with contextlib.suppress(OSError):
        if _is_record_current():
            return
        used = files_in_use()
        if sum(end - begin for spans in used.values() for begin, end in spans) > MAX_RECORDED_BYTES:
            return
        file = _record_path()
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({path: (Path(path).stat().st_size, spans) for path, spans in used.items()}))
        draft.replace(file)


def files_in_use() -> dict[str, list[FileRange]]:
    """Return the parts of each file that this process has used."""
    return _package_files() | _module_files() | _mapped_file_ranges()


def _is_record_current() -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        note = json.loads(_record_path().read_text())
        return all(Path(path).stat().st_size == size for path, (size, _) in note.items())
    return False


def _record_path() -> Path:
    python = hashlib.sha256(f"{RECORD_VERSION} {sys.prefix} {sys.version}".encode()).hexdigest()[:12]
    return cache_dir() / "starts" / f"{python}.json"


def _module_files() -> dict[str, list[FileRange]]:
    """Return Python's files in the order of import, and the directories that were searched.

    A compiled file is listed with its whole range. Its source file is listed without a range, which means that it is
    only opened, unless a traceback has read the source."""
    files: dict[str, list[FileRange]] = {path: [] for path in list(sys.path_importer_cache) if Path(path).is_dir()}
    for name, module in list(sys.modules.items()):
        source = getattr(getattr(module, "__spec__", None), "origin", None) or _find_source(name)
        if isinstance(source, str) and Path(source).is_file():
            files[source] = []
            compiled = cache_from_source(source)
            read = compiled if Path(compiled).is_file() else source
            files[read] = [(0, Path(read).stat().st_size)]
    for source in list(linecache.cache):
        if source in files:
            files[source] = [(0, Path(source).stat().st_size)]
    return files


def _package_files() -> dict[str, list[FileRange]]:
    """Return the entry point files of all installed packages. triton searches them for its backends."""
    files: dict[str, list[FileRange]] = {}
    for directory in [Path(path) for path in sys.path] if "importlib.metadata" in sys.modules else []:
        for package in directory.glob("*.dist-info"):
            files[str(package)] = []
            if (points := package / "entry_points.txt").is_file():
                files[str(points)] = [(0, points.stat().st_size)]
    return files


def _find_source(name: str) -> str | None:
    """Return the likely source file of a module that was replaced in sys.modules; None if there is none."""
    parent, _, last = name.rpartition(".")
    for directory in getattr(sys.modules.get(parent), "__path__", ()):
        for file in (Path(directory) / f"{last}.py", Path(directory) / last / "__init__.py"):
            if file.is_file():
                return str(file)
    return None


def _mapped_file_ranges() -> dict[str, list[FileRange]]:
    """Return the ranges of mapped files whose pages are in this process's memory."""
    pages: dict[str, set[FileRange]] = {}
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/pagemap").open("rb") as pagemap:
        for line in maps.readlines():
            addresses, _, offset, _, _, *name = line.split(maxsplit=5)
            path = name[0].rstrip("\n") if name else ""
            if path.startswith("/") and not path.startswith("/dev/") and Path(path).is_file():
                begin, end = (int(part, 16) // mmap.PAGESIZE for part in addresses.split("-"))
                states = array("Q", os.pread(pagemap.fileno(), 8 * (end - begin), 8 * begin))
                pages.setdefault(path, set()).update(_present_ranges(states, int(offset, 16)))
    return {path: merge_ranges(sorted(spans)) for path, spans in pages.items() if spans}


def _present_ranges(page_states: array[int], file_offset: int) -> list[FileRange]:
    size = mmap.PAGESIZE
    return merge_ranges(
        [
            (file_offset + i * size, file_offset + (i + 1) * size)
            for i, s in enumerate(page_states)
            if s >> PAGE_PRESENT_BIT
        ]
    )


def merge_ranges(ranges: list[FileRange]) -> list[FileRange]:
    """Merge sorted ranges that overlap or have a gap of less than MAX_GAP_BYTES."""
    out: list[FileRange] = []
    for begin, end in ranges:
        if out and begin - out[-1][1] < MAX_GAP_BYTES:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def _create_gpu_context() -> None:
    """Create the CUDA context of the first GPU ahead of torch.

    Errors are ignored: torch reports them later."""
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
