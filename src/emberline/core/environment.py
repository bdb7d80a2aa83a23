"""Environment variables that processes of a cluster pass to their children."""

from __future__ import annotations

import os
from collections.abc import Mapping

SUPERVISED_VARIABLE = "EMBERLINE_SUPERVISED"


def supervised_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process that must end when its supervisor closes its stdin."""
    return {**environment, SUPERVISED_VARIABLE: "1"}


def is_supervised() -> bool:
    """Return whether a supervisor started this process.

    The call also removes the environment variable that marks the process, so that its children do not inherit it."""
    return os.environ.pop(SUPERVISED_VARIABLE, "") == "1"


def visible_gpus() -> list[str] | None:
    """Return the devices in CUDA_VISIBLE_DEVICES; None means all."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]
