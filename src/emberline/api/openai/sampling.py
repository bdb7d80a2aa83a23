"""The fields chat and text completions share: OpenAI's own, and vLLM's extensions as further top-level fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from emberline.api.call import Caller
from emberline.api.openai.grammar import GrammarFields
from emberline.api.parse import Wire
from emberline.core.errors import InvalidRequest
from emberline.core.params import MAX_COMPLETIONS, MAX_LOGPROBS, SamplingParams
from emberline.core.request import Priority

Name = Annotated[str, Meta(min_length=1, max_length=512)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Never = Annotated[bool, Meta(extra_json_schema={"const": False})]  # a switch we have only in its off position


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: Never | None = None


class RunningStreamOptions(StreamOptions):
    continuous_usage_stats: bool | None = None  # vLLM's: every chunk says what was used so far

    def running(self) -> bool:
        if self.continuous_usage_stats and not self.include_usage:
            param = "stream_options.continuous_usage_stats"
            raise InvalidRequest(f"{param} needs include_usage", param=param, hint="send include_usage: true too")
        return bool(self.continuous_usage_stats)


class SamplingFields(GrammarFields, kw_only=True):
    model: Name
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_COMPLETIONS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast"] | None = None
    # vLLM's
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: LogprobCount | None = None
    priority: int | None = None  # above 0: batch
    cache_salt: str | None = None

    def caller(self, *, user: str | None = None, salt: str | None = None) -> Caller:
        """`user` and `salt` are what the endpoint's own fields say beside the shared ones."""
        if salt and self.cache_salt and salt != self.cache_salt:
            raise InvalidRequest("cache_salt and prompt_cache_key differ", param="cache_salt", hint="give one of them")
        users = dict.fromkeys(name for name in (user, self.user) if name)
        batch = self.service_tier == "flex" or (self.priority or 0) > 0
        return Caller(
            model=self.model,
            priority=Priority.BATCH if batch else Priority.INTERACTIVE,
            salt=self.cache_salt or salt or "",
            user=" ".join(users) or None,
        )

    def params(self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        skip_special = self.skip_special_tokens
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            n=1 if self.n is None else self.n,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=dict(self.logit_bias or {}),
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=tuple(stop),
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=True if skip_special is None else skip_special,
            grammar=self.grammar(),
        )

    def include_usage(self) -> bool:
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options needs stream", param="stream_options", hint="send stream: true too")
        refuse_true(self.stream_options.include_obfuscation, "stream_options.include_obfuscation")
        return bool(self.stream_options.include_usage)


def refuse_true(value: bool | None, param: str) -> None:
    if value:
        raise InvalidRequest(f"{param} is not served", param=param, hint="leave it out or false")
