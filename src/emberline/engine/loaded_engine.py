"""LoadedEngine: an engine with a loaded model, and what is reported about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from emberline.core.numerics import Numerics
from emberline.engine.engine import Engine
from emberline.engine.rank_summary import RankSummary
from emberline.kv.cache import KVCache
from emberline.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded engine, its properties, and the seconds that each phase of loading took."""

    engine: Engine
    max_context: int
    kv_tokens: int
    weight_bytes: int
    kv_bytes: int
    kernels: str
    seconds: dict[str, float]
    device: str
    kv_dtype: str
    numerics: Numerics
    stored_dtype: str  # of the matrices in the checkpoint's files, or their format if they are quantised
    full_context: int  # the model's context in tokens, if the default context is shorter; else 0
    ranks: tuple[RankSummary, ...] = ()  # among which the model is divided; empty: it is not


def full_context(model: DecoderModel) -> int:
    is_cut = model.config.is_default_context_cut and model.context == model.config.max_context
    return model.config.longest_context if is_cut else 0


def numerics_of(model: DecoderModel, cache: KVCache, weights: str, device: str, ranks: str = "") -> Numerics:
    dtype, kv_dtype = (str(each).removeprefix("torch.") for each in (model.dtype, cache.shape.dtype))
    return Numerics(model.fingerprint.partition("-")[0], dtype, weights, kv_dtype, device, ranks)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
