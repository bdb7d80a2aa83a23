"""Request fields that chat and text completions share: OpenAI's, and vLLM's top-level extensions."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from emberline.api.call import CommonFields
from emberline.api.fields import IgnoredField
from emberline.api.openai.grammar import GrammarFields
from emberline.api.parse import WireStruct
from emberline.core.errors import InvalidRequest
from emberline.core.params import MAX_COMPLETIONS, MAX_LOGPROBS, SamplingParams
from emberline.core.request import Priority

ModelName = Annotated[str, Meta(max_length=512)]  # empty: the server's only model
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
MAX_TOKEN_ID = (1 << 31) - 1
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopText = Annotated[str, Meta(max_length=1024)]  # an empty text has no effect
BadWord = Annotated[str, Meta(min_length=1, max_length=1024)]


_TOKEN_ID = re.compile(r"[0-9]{1,10}\Z")


class StreamOptions(WireStruct):
    include_usage: bool | None = None
    include_obfuscation: IgnoredField = None  # asks for padding that hides the length of events


class UsageStreamOptions(StreamOptions):
    continuous_usage_stats: bool | None = None  # vLLM's field: every chunk has the usage so far

    def reports_running_usage(self) -> bool:
        return bool(self.continuous_usage_stats and self.include_usage)

    def find_ignored_fields(self) -> list[str]:
        """Return the ignored fields: continuous_usage_stats has no effect without include_usage, as in vLLM."""
        return (
            ["stream_options.continuous_usage_stats"]
            if self.continuous_usage_stats and not self.reports_running_usage()
            else []
        )


# SamplingParams for which a checkpoint's generation_config.json gives the default.
CHECKPOINT_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class SamplingFields(GrammarFields, kw_only=True):
    model: ModelName | None = None  # required only if the server has several models
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # 0: greedy
    n: Annotated[int, Meta(ge=1, le=MAX_COMPLETIONS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    service_tier: str | None = None  # flex: batch priority; any other value: the default
    # vLLM's fields, except where noted
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None  # llama.cpp's name of repetition_penalty
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: LogprobCount | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None  # -1: the context's length
    truncation_side: Literal["left", "right"] | None = None  # the end that is cut; default left, as in vLLM
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # logprobs write tokens as "token_id:N"
    request_id: RequestId | None = None
    rid: RequestId | None = None  # SGLang's name of request_id
    n_predict: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None  # llama.cpp's max_tokens; -1: no limit
    priority: int | None = None  # above 0: batch priority
    cache_salt: str | None = None

    def build_common_fields(self, *, extra_user_id: str | None = None) -> CommonFields:
        """Return the fields that every call has.

        `extra_user_id`, from a field such as safety_identifier, is logged beside the id in the `user` field.
        """
        users = dict.fromkeys(name for name in (extra_user_id, self.user) if name)
        batch = self.service_tier == "flex" or (self.priority or 0) > 0
        return CommonFields(
            model=self.model or "",
            priority=Priority.BATCH if batch else Priority.INTERACTIVE,
            cache_salt=self.cache_salt or "",
            user=" ".join(users) or None,
            request_id=self.request_id or self.rid,
        )

    def list_unset_params(self, max_tokens: int | None) -> frozenset[str]:
        """Return the sampling parameters that the request leaves unset; the checkpoint's defaults apply."""
        names = {name for name in CHECKPOINT_DEFAULTS if getattr(self, name) is None}
        if self.repeat_penalty is not None:
            names.discard("repetition_penalty")
        if self.top_p == 0:
            names.discard("temperature")
        has_limit = max_tokens is not None or self.n_predict is not None  # n_predict: -1 asks for no limit
        return frozenset(names if has_limit else {*names, "max_tokens"})

    def build_sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        skip_special = self.skip_special_tokens
        temperature = 1.0 if self.temperature is None else self.temperature
        repetition = self.repetition_penalty if self.repetition_penalty is not None else self.repeat_penalty
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            n=1 if self.n is None else self.n,
            temperature=0.0 if self.top_p == 0 else temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if repetition is None else repetition,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_parse_logit_bias(self.logit_bias or {}),
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=tuple(filter(None, stop)),
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=True if skip_special is None else skip_special,
            grammar=self.grammar(),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
        )

    def resolve_max_tokens(self, *limits: tuple[str, int | None]) -> int | None:
        """Return the maximum number of generated tokens from `limits`: (field name, value) pairs.

        Raises InvalidRequest if two fields set different limits."""
        given = [(name, value) for name, value in limits if value is not None]
        if self.n_predict is not None and self.n_predict >= 0:
            given.append(("n_predict", self.n_predict))
        for name, value in given[1:]:
            first_name, first = given[0]
            if value != first:
                what = f"{first_name} is {first} and {name} is {value}; they must be equal"
                raise InvalidRequest(what, param=first_name, hint="send one of them")
        return given[0][1] if given else None

    def returns_usage(self) -> bool:
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest(
                "stream_options requires stream: true", param="stream_options", hint="send stream: true too"
            )
        return bool(self.stream_options.include_usage)


def _parse_logit_bias(biases: dict[str, float]) -> dict[int, float]:
    """Return `logit_bias` with integers as keys. Raises InvalidRequest if a key is not a token id."""
    wrong = [key[:40] for key in biases if _TOKEN_ID.match(key) is None or int(key) > MAX_TOKEN_ID]
    if wrong:
        listed = ", ".join(map(repr, wrong[:8]))
        hint = f"use ids in [0, {MAX_TOKEN_ID}]; POST /tokenize returns the ids of a text"
        raise InvalidRequest(f"logit_bias has keys that are not token ids: {listed}", param="logit_bias", hint=hint)
    return {int(key): bias for key, bias in biases.items()}
