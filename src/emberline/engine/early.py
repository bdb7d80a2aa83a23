"""early: what a process that will compute on a GPU does before it imports torch. It needs only the standard library.

A cold start waits for the disk three times: for the libraries, which are mapped and fault in page by page; for Python's
files; for the weights. The first two come in the order of their use, a small read at a time, and behind a disk that is
busy with weights each read waits long. So a start notes which files, and which parts of them, it touched; the next one
reads those first, many at once, then has another process read the weights, and imports from memory. A note that is old
or missing costs only time.
"""

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
from emberline.models.reader import Reader, files_of

WAIT = 5.0  # seconds at most for what the last start touched
GAP = 256 << 10  # parts of a file nearer than this are read as one
PRESENT = 63  # the bit of a page that is there, in /proc/self/pagemap
LIMIT = 4 << 30  # bytes noted at most: more would cost more than it saves

VERSION = 2  # of what is noted

Span = tuple[int, int]  # [begin, end) of a file


def begin(model: Path) -> Reader:
    """Starts on everything that takes long and needs no torch. Returns when an import will find its files in memory;
    the reader goes on with the checkpoint's."""
    reader = start_reader(files_of(Checkpoint.open(model)), first())
    threading.Thread(target=_open_device, name="device", daemon=True).start()
    reader.wait_first(WAIT)
    return reader


def without_tracing() -> None:
    """Shape rules for traced programs: a third of the time torch takes to import, and nothing here traces. Nor does
    anything need other vendors' devices, for which it would look into every package that is installed."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    sys.modules.setdefault("torch._meta_registrations", types.ModuleType("torch._meta_registrations"))


def noted() -> dict[str, list[Span]]:
    """By file, what an earlier start of this Python touched. Nobody looks here whether the files are still the same:
    on a cold disk that alone would take long."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        note = json.loads(_note().read_text())
        return {path: [(begin, end) for begin, end in spans] for path, (_, spans) in note.items()}
    return {}


def first() -> list[tuple[str, int, int]]:
    """What is noted, for a reader to begin with."""
    return [(path, begin, end) for path, spans in noted().items() for begin, end in (spans or [(0, 0)])]


def remember() -> None:
    """For the next start, unless the note there is still holds. Call it once all that a start loads is loaded."""
    with contextlib.suppress(OSError):
        if _holds():
            return
        found = touched()
        if sum(end - begin for spans in found.values() for begin, end in spans) > LIMIT:
            return
        file = _note()
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({path: (Path(path).stat().st_size, spans) for path, spans in found.items()}))
        draft.replace(file)


def touched() -> dict[str, list[Span]]:
    """By file, what this process has used."""
    return _packages() | _modules() | _mapped()


def _holds() -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        note = json.loads(_note().read_text())
        return all(Path(path).stat().st_size == size for path, (size, _) in note.items())
    return False


def _note() -> Path:
    python = hashlib.sha256(f"{VERSION} {sys.prefix} {sys.version}".encode()).hexdigest()[:12]
    return cache_dir() / "starts" / f"{python}.json"


def _modules() -> dict[str, list[Span]]:
    """Python's own files in the order of import: the compiled one whole, beside which the source is only looked at,
    unless someone asked for its text. And the directories that were searched."""
    found: dict[str, list[Span]] = {path: [] for path in list(sys.path_importer_cache) if Path(path).is_dir()}
    for name, module in list(sys.modules.items()):
        source = getattr(getattr(module, "__spec__", None), "origin", None) or _source(name)
        if isinstance(source, str) and Path(source).is_file():
            found[source] = []
            compiled = cache_from_source(source)
            read = compiled if Path(compiled).is_file() else source
            found[read] = [(0, Path(read).stat().st_size)]
    for source in list(linecache.cache):
        if source in found:
            found[source] = [(0, Path(source).stat().st_size)]
    return found


def _packages() -> dict[str, list[Span]]:
    """What triton looks through for its backends: the entry points of everything that is installed."""
    found: dict[str, list[Span]] = {}
    for directory in [Path(path) for path in sys.path] if "importlib.metadata" in sys.modules else []:
        for package in directory.glob("*.dist-info"):
            found[str(package)] = []
            if (points := package / "entry_points.txt").is_file():
                found[str(points)] = [(0, points.stat().st_size)]
    return found


def _source(name: str) -> str | None:
    """Where a module was probably from that something else has taken the place of."""
    parent, _, last = name.rpartition(".")
    for directory in getattr(sys.modules.get(parent), "__path__", ()):
        for file in (Path(directory) / f"{last}.py", Path(directory) / last / "__init__.py"):
            if file.is_file():
                return str(file)
    return None


def _mapped() -> dict[str, list[Span]]:
    """The pages of mapped files that this process has used, or that lay beside them."""
    pages: dict[str, set[Span]] = {}
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/pagemap").open("rb") as pagemap:
        for line in maps.readlines():
            where, _, offset, _, _, *name = line.split(maxsplit=5)
            path = name[0].rstrip("\n") if name else ""
            if path.startswith("/") and not path.startswith("/dev/") and Path(path).is_file():
                begin, end = (int(part, 16) // mmap.PAGESIZE for part in where.split("-"))
                states = array("Q", os.pread(pagemap.fileno(), 8 * (end - begin), 8 * begin))
                pages.setdefault(path, set()).update(_present(states, int(offset, 16)))
    return {path: joined(sorted(spans)) for path, spans in pages.items() if spans}


def _present(states: array[int], offset: int) -> list[Span]:
    size = mmap.PAGESIZE
    return joined([(offset + i * size, offset + (i + 1) * size) for i, s in enumerate(states) if s >> PRESENT])


def joined(spans: list[Span]) -> list[Span]:
    """Ordered spans, with those made one that overlap or have little between them."""
    out: list[Span] = []
    for begin, end in spans:
        if out and begin - out[-1][1] < GAP:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def _open_device() -> None:
    """The context of the first GPU: torch finds it made. What goes wrong here goes wrong there too, and is said."""
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
