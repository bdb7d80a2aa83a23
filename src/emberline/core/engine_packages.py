"""The packages that only engines need. The extras `cpu` and `gpu` install them; routers and gateways run without."""

from __future__ import annotations

import importlib.util

from emberline.core.errors import InvalidRequest

ENGINE_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "llguidance")
INSTALL_HINT = "run pip install 'emberline[cpu]', or 'emberline[gpu]' on a machine with an NVIDIA GPU"


def require_engine_packages(purpose: str) -> None:
    """Raise InvalidRequest unless all packages of an engine are installed. `purpose`: what needs them."""
    if missing := [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]:
        raise missing_packages_error(purpose, *missing)


def missing_packages_error(purpose: str, *missing: str) -> InvalidRequest:
    return InvalidRequest(f"{purpose} needs packages that are not installed: {', '.join(missing)}", hint=INSTALL_HINT)
