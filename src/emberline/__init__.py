"""Emberline, an open LLM inference stack. For offline use: `from emberline import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from emberline.core.params import SamplingParams
    from emberline.engine.llm import LLM


def __getattr__(name: str) -> Any:
    # Imported late, so that gateway, router and command line start without torch.
    if name == "LLM":
        from emberline.core.engine_packages import require_engine_packages

        require_engine_packages("emberline.LLM")
        from emberline.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from emberline.core.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'emberline' has no attribute {name!r}")
