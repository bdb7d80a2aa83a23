"""list_modules: the modules of all CUDA kernels, which can be compiled before there is a GPU.

`nvrtc.compile_cached` finds a compiled module by its source and the names of all its kernels. So a module listed here
must have the same kernels as the module that a launch loads. Most modules have one kernel, because a model needs
few."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from emberline.kernels import cuda
from emberline.kernels.cuda.driver import CudaModule


def find_sources() -> dict[str, ModuleType]:
    """Return the Python modules of this package that launch kernels, by their names within it."""
    names = (each.name for each in pkgutil.iter_modules(cuda.__path__))
    found = {name: importlib.import_module(f"{cuda.__name__}.{name}") for name in names}
    return {name: source for name, source in found.items() if hasattr(source, "VARIANTS")}


def list_modules(*names: str) -> list[CudaModule]:
    """Return the modules of kernels that the Python modules `names` launch; without names, of all Python modules.

    Raises ValueError if no Python module that launches kernels has one of the names."""
    sources = find_sources()
    if unknown := sorted(set(names) - sources.keys()):
        raise ValueError(f"no kernels are named {', '.join(unknown)} (hint: choose from {', '.join(sources)})")
    modules = (module for name in names or sources for module in _list_modules_of(sources[name]))
    return list({(module.file, module.kernels): module for module in modules}.values())


def _list_modules_of(source: ModuleType) -> list[CudaModule]:
    if hasattr(source, "list_modules"):  # several kernels are in one module
        listed: list[CudaModule] = source.list_modules()
        return listed
    return [CudaModule(source.FILE, [name]) for name in getattr(source, "KERNELS", source.VARIANTS)]
