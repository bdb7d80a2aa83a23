"""Reads the default sampling parameters in a checkpoint's generation_config.json, as vLLM does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest, ModelFileError
from emberline.core.jsonfile import read_object, read_object_if_exists
from emberline.core.params import SamplingParams

log = logging.getLogger("emberline.server")

GENERATION_CONFIG_FILE = "generation_config.json"
# From the file's names to those of SamplingParams. `do_sample` is not read: requests are sampled by default.
PARAM_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
DEFAULT_MAX_TOKENS = 4096  # longer than nearly every answer; a model that repeats itself ends after it
DEFAULT_MAX_TOKENS_OF_REASONING = 32_768  # reasoning counts too
INTEGER_SETTINGS = ("top_k", "max_new_tokens")


def load_sampling_defaults(directory: Path, source: str = "auto") -> dict[str, Any]:
    """Return default values for fields of SamplingParams, by field name.

    `source`: "auto" for the file in the checkpoint, "none" for no defaults, or a different directory with the file.
    Raises InvalidRequest if that directory has no such file. An invalid value is skipped with a warning.
    """
    if source == "none":
        return {}
    found: dict[str, Any] = {}
    for name, value in _read_generation_config(directory, source).items():
        if name not in PARAM_NAMES or value is None:
            continue
        try:
            setting: dict[str, Any] = {PARAM_NAMES[name]: _parse_number(name, value)}
            SamplingParams(**setting)
        except (InvalidRequest, TypeError, ValueError):
            log.warning(
                "Sampling default ignored, invalid value: file=%s model=%s %s=%.100r",
                GENERATION_CONFIG_FILE,
                directory.name,
                name,
                value,
            )
        else:
            found |= setting
    return found


def with_default_max_tokens(defaults: dict[str, Any], setting: int | None, *, reasons: bool) -> dict[str, Any]:
    """Return the defaults with a limit of generated tokens, for requests that set none.

    `setting`: the server's setting; 0 stands for no limit, None for that of the checkpoint, or else ours."""
    if setting is not None:
        others = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return {**others, "max_tokens": setting} if setting else others
    return {"max_tokens": DEFAULT_MAX_TOKENS_OF_REASONING if reasons else DEFAULT_MAX_TOKENS} | defaults


def _read_generation_config(directory: Path, source: str) -> dict[str, Any]:
    if source == "auto":
        return read_object_if_exists(directory / GENERATION_CONFIG_FILE)
    try:
        return read_object(Path(source) / GENERATION_CONFIG_FILE)
    except (ModelFileError, OSError) as error:
        hint = f"--generation-config takes auto, none, or a directory that contains {GENERATION_CONFIG_FILE}"
        raise InvalidRequest(
            f"cannot read --generation-config {source!r}: {error}", param="generation_config", hint=hint
        ) from error


def _parse_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(name)
    return max(int(value), 0) if name in INTEGER_SETTINGS else float(value)
