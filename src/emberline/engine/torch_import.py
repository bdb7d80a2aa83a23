"""Makes the import of torch faster in an engine process on a machine without a GPU. Standard library only.

Two fifths of torch's own Python code compile, export, trace and quantise models, or load data for training. An engine
on a CPU never does that, so these modules are replaced by empty ones. Their classes have no content: isinstance() is
false for every object, and creating one after the import raises RuntimeError, so that nothing is silently left out.

Only versions of torch that match KNOWN_VERSION are imported in this way. Any other version is imported with all these
modules: it works the same, and a start takes about half a second longer. Before another version is added to
KNOWN_VERSION, the tests in tests/cpu must pass with it.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

GPU_DRIVERS = Path("/proc/driver/nvidia"), Path("/dev/dxg")  # the second one: inside Windows (WSL)
KNOWN_VERSION = re.compile(r"2\.13\.")  # of torch, whose own modules are known to need nothing of the replaced ones
REPLACED_MODULES = frozenset(
    {
        "torch._export",
        "torch._functorch",
        "torch._higher_order_ops",
        "torch._meta_registrations",
        "torch._native",
        "torch._subclasses",
        "torch.ao",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.fx",
        "torch.hub",
        "torch.masked",
        "torch.nested",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.quantization",
        "torch.testing",
        "torch.utils.data",
        "torchgen",
        "unittest.mock",  # imports asyncio and ssl; a module that torch replaces uses it
    }
)


def has_gpu_driver() -> bool:
    """Return whether the machine may have a GPU, for which torch must be imported as a whole."""
    return any(path.exists() for path in GPU_DRIVERS)


def import_torch_for_cpu() -> None:
    """Import torch without the modules that an engine on a CPU does not need, if its version is known."""
    finder = prepare_torch_import()
    torch = importlib.import_module("torch")
    if finder is not None:
        # torch._prims.rng_prims, which a replaced module would import, does this. torch.Generator() needs it.
        torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
        finder.is_torch_imported = True


def prepare_torch_import() -> ReplacedModuleFinder | None:
    """Replace modules that torch will import, and return the finder of their replacements.

    Replace nothing and return None if torch was imported already, or has no known version."""
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(spec.submodule_search_locations[0])
    if not KNOWN_VERSION.match(_read_version(directory)):
        return None
    finder = ReplacedModuleFinder()
    sys.meta_path.insert(0, finder)
    return finder


def _read_version(directory: Path) -> str:
    try:
        text = (directory / "version.py").read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else ""


class ReplacedModuleFinder:
    """Finds empty modules for the names in REPLACED_MODULES, and for their submodules."""

    def __init__(self) -> None:
        self.is_torch_imported = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = name.split(".")
        if not any(".".join(parts[:count]) in REPLACED_MODULES for count in (1, 2, 3)):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ReplacedModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


class ReplacedModule(ModuleType):
    """A module whose names are all empty classes, so that other modules can import and subclass them."""

    def __init__(self, name: str, finder: ReplacedModuleFinder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        content = {"__module__": self.__name__, "__init__": self._make_initialiser(name), "__call__": _return_first}
        value = type(name, (), content)
        setattr(self, name, value)
        return value

    def _make_initialiser(self, name: str) -> Any:
        def initialise(instance: object, *args: object, **kwargs: object) -> None:
            if self._finder.is_torch_imported:
                raise RuntimeError(
                    f"{self.__name__}.{name} cannot be used in an engine process on a CPU: the module is replaced"
                    " (hint: see emberline/engine/torch_import.py)"
                )

        return initialise


def _return_first(self: object, first: object = None, *args: object, **kwargs: object) -> object:
    """Return the decorated function, if an object of an empty class is used as a decorator."""
    return first
