"""Makes the import of torch faster in an engine process on a machine without a GPU. Standard library only.

A fifth of the import is for modules that compile, export and quantise models, or register kernels for GPUs. An engine
on a CPU never does that, so these modules are replaced by empty ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

GPU_DRIVER = Path("/proc/driver/nvidia")
KNOWN_VERSION = re.compile(r"2\.13\.")  # of torch, whose own modules are known to need nothing of the replaced ones
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
    """Replace modules of torch that an engine on a CPU does not need, if its version is known to work without them."""
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    directory = Path(spec.submodule_search_locations[0])
    if KNOWN_VERSION.search(_read_version(directory)):
        sys.meta_path.insert(0, ReplacedModuleFinder())


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
