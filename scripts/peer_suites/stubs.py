"""Stand-ins for a peer's Python package: its tests can be imported, and a test that calls into it is set aside."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar

from serving import set_aside


class Stub:
    """Any attribute of a peer's package. Using it sets the test aside."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        set_aside(f"calls {self._name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Any:  # in annotations
        return self

    __ror__ = __or__
    __add__ = __sub__ = __lt__ = __gt__ = __iter__ = __len__ = __getitem__ = __call__


class StubModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (Exception,), {}) if name.endswith(("Error", "Exception")) else None
        if made is None:
            made = Stub(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stub_packages(*packages: str) -> None:
    sys.meta_path.insert(0, _Finder(packages))


def set_module(name: str, **members: Any) -> None:
    """Puts working members into a stubbed module."""
    module = sys.modules.get(name) or StubModule(name)
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
