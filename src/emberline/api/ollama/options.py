"""`options` and `format` of Ollama's requests: how tokens are sampled.

Options that set how Ollama loads a model (`num_ctx`, `num_gpu` ..) and samplers that Emberline does not have are
accepted without effect. Where neither the request nor the checkpoint sets a value, Ollama's default is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.fields import IgnoredField
from emberline.api.openai.sampling import CHECKPOINT_DEFAULTS
from emberline.api.parse import WireStruct, encode_json_text
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec, SamplingParams

DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P = 0.8, 40, 0.9
MAX_INTEGER = (1 << 31) - 1

# Ollama takes integers that are written as floats, so all numbers are decoded as floats.
Integer = Annotated[float, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
StopText = Annotated[str, Meta(max_length=1024)]  # an empty text has no effect


class Options(WireStruct):
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Integer | None = None  # 0 or less: off
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # 0: greedy
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Integer | None = None  # below 0: random
    num_predict: Integer | None = None  # 0 or less: no limit
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    # 0 or less: off. LiteLLM and Open WebUI send OpenAI's frequency_penalty here, whose neutral value is 0.
    repeat_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    # without effect
    num_ctx: IgnoredField = None
    num_keep: IgnoredField = None
    num_batch: IgnoredField = None
    num_gpu: IgnoredField = None
    num_gqa: IgnoredField = None
    num_thread: IgnoredField = None
    main_gpu: IgnoredField = None
    draft_num_predict: IgnoredField = None
    repeat_last_n: IgnoredField = None
    typical_p: IgnoredField = None
    tfs_z: IgnoredField = None
    mirostat: IgnoredField = None
    mirostat_eta: IgnoredField = None
    mirostat_tau: IgnoredField = None
    penalize_newline: IgnoredField = None
    numa: IgnoredField = None
    low_vram: IgnoredField = None
    f16_kv: IgnoredField = None
    logits_all: IgnoredField = None
    vocab_only: IgnoredField = None
    use_mmap: IgnoredField = None
    use_mlock: IgnoredField = None
    embedding_only: IgnoredField = None

    def find_unset_params(self) -> frozenset[str]:
        """Return the sampling parameters that the request leaves unset; the checkpoint's defaults apply."""
        names = {"repetition_penalty": "repeat_penalty"}
        unset = {name for name in CHECKPOINT_DEFAULTS if getattr(self, names.get(name, name)) is None}
        if self.top_p == 0:
            unset.discard("temperature")
        return frozenset(unset if self.num_predict is not None else {*unset, "max_tokens"})

    def build_sampling_params(self, grammar: GrammarSpec | None, logprobs: int | None) -> SamplingParams:
        stop: Sequence[str] = [self.stop] if isinstance(self.stop, str) else self.stop or []
        temperature = DEFAULT_TEMPERATURE if self.temperature is None else self.temperature
        top_k = DEFAULT_TOP_K if self.top_k is None else int(self.top_k)
        limit, penalty = int(self.num_predict or 0), self.repeat_penalty or 0.0
        return SamplingParams(
            max_tokens=min(limit, MAX_INTEGER) if limit > 0 else None,
            temperature=0.0 if self.top_p == 0 else temperature,
            top_k=min(max(top_k, 0), MAX_INTEGER),
            top_p=self.top_p or (DEFAULT_TOP_P if self.top_p is None else 1.0),
            min_p=self.min_p or 0.0,
            repetition_penalty=penalty if penalty > 0 else 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=None if self.seed is None or self.seed < 0 else int(self.seed),
            logprobs=logprobs,
            stop=tuple(filter(None, stop)),
            grammar=grammar,
        )


def parse_format(value: str | dict[str, Any] | None) -> GrammarSpec | None:
    """Return the grammar of the field `format`: "json", a JSON schema, or nothing."""
    if not value:
        return None
    if isinstance(value, dict):
        return GrammarSpec("json_schema", encode_json_text(value))
    if value != "json":
        what = f'format is {value[:100]!r}; it must be "json" or a JSON schema'
        raise InvalidRequest(what, param="format", hint="send the schema as an object")
    return GrammarSpec("json_object")
