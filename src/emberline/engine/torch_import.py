"""Makes the import of torch faster in an engine process on a machine without a GPU.

Loading torch's library takes a third of the import, and needs no Python: a thread does it during other imports. Another
fifth is for modules that compile and export models, which an engine never does: they are replaced by empty ones.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

GPU_DRIVER = Path("/proc/driver/nvidia")
KNOWN_VERSION = re.compile(r"2\.13\.")  # of torch, whose own modules are known to need nothing of the replaced ones
# Modules of the engine with libraries of their own. They are imported first, since the loader of libraries has a lock.
LIBRARY_MODULES = (
    *(
        "numpy",
        "msgspec",
        "array",
        "binascii",
        "bisect",
        "bz2",
        "contextvars",
        "csv",
        "ctypes",
        "datetime",
        "decimal",
        "fcntl",
    ),
    *("hashlib", "heapq", "json", "lzma", "math", "mmap", "pickle", "queue", "random", "select", "socket"),
    *("statistics", "struct", "subprocess", "uuid", "zlib"),
)
REPLACED_MODULES = frozenset(
    {
        "_export",
        "_functorch",
        "_higher_order_ops",
        "_meta_registrations",
        "_native",
        "ao",
        "distributions",
        "export",
        "func",
        "hub",
        "masked",
        "nn.intrinsic",
        "nn.qat",
        "nn.quantizable",
        "nn.quantized",
        "quantization",
        "testing",
    }
)


def prepare_torch_import() -> None:
    """Start loading torch's library in a thread, and replace modules that an engine on a CPU does not need."""
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    directory = Path(spec.submodule_search_locations[0])
    library = directory / "lib" / "libtorch_cpu.so"
    if library.is_file():
        for name in LIBRARY_MODULES:
            import_module(name)
        threading.Thread(target=_load_library, args=(library,), name="torch library", daemon=True).start()
    if KNOWN_VERSION.search(_read_version(directory)):
        sys.meta_path.insert(0, ReplacedModuleFinder())


def _load_library(path: Path) -> None:
    """Load a library. An import or ctypes.CDLL would hold the GIL meanwhile; a foreign call of dlopen does not."""
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    load(os.fsencode(path), os.RTLD_LAZY)


def _read_version(directory: Path) -> str:
    try:
        text = (directory / "version.py").read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else ""


class ReplacedModule(ModuleType):
    """A module whose names are all empty classes, so that other modules can import and subclass them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = type(name, (), {"__module__": self.__name__, "__init__": _accept, "__call__": _return_first})
        setattr(self, name, value)
        return value


def _accept(self: object, *args: object, **kwargs: object) -> None:
    """Initialise an object of an empty class."""


def _return_first(self: object, first: object = None, *args: object, **kwargs: object) -> object:
    """Return the decorated function, if an object of an empty class is used as a decorator."""
    return first


class ReplacedModuleFinder:
    """Finds empty modules for the names in REPLACED_MODULES, and for their submodules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, _, rest = name.partition(".")
        parts = rest.split(".")
        if first != "torch" or not {parts[0], ".".join(parts[:2])} & REPLACED_MODULES:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ReplacedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""
