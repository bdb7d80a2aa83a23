"""Optional dependencies, which only some processes need, and how to install them as extras of this package.

Engines need the extra `cpu` or `gpu`. Routers and gateways need neither."""

from __future__ import annotations

import importlib.util

from emberline.core.errors import InvalidRequest

ENGINE_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "llguidance")


def install_hint(extra: str) -> str:
    """Return how to install an extra, from a checkout or a wheel, because Emberline is not on a package index."""
    return f"pip install '.[{extra}]' in a checkout of Emberline, or pip install 'FILE.whl[{extra}]' with its wheel"


INSTALL_HINT = f"{install_hint('cpu')}; with an NVIDIA GPU, gpu instead of cpu"


def require_engine_packages(purpose: str) -> None:
    """Raise InvalidRequest unless all packages of an engine are installed. `purpose`: what needs them."""
    if missing := [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]:
        raise missing_packages_error(purpose, *missing)


def missing_packages_error(purpose: str, *missing: str) -> InvalidRequest:
    return InvalidRequest(f"{purpose} needs packages that are not installed: {', '.join(missing)}", hint=INSTALL_HINT)
