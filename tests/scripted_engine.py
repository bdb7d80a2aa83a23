"""A worker's HTTP side with a scripted engine.

The output depends only on the prompt, the seed and the tokens so far, so that any worker can continue a reply.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from bytelevel import EOS, byte_level
from tokenizers import AddedToken

from emberline.api.reasoning import THINK, ReasoningStyle
from emberline.api.tool_styles.registry import HERMES
from emberline.api.tool_styles.style import ToolStyle
from emberline.core.config import ServerConfig, WorkerConfig
from emberline.core.errors import EmberlineError
from emberline.core.events import Output, Timing
from emberline.core.params import GrammarSpec
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason, Submission
from emberline.engine.async_engine import AsyncEngine, EngineState
from emberline.net.request_response_cycle import ReplyInterrupted
from emberline.server.metrics import ModelMetrics
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.catalog import LoadedModel, ModelCatalog
from emberline.worker.engine_app import EngineApp
from emberline.worker.generator import Generator
from emberline.worker.grammar_checker import GrammarChecker
from emberline.worker.prompt_builder import PromptBuilder

TEMPLATE = "{{ messages[-1].content }}|{{ '<think></think>' if false }}"
Script = Callable[[str, int], str]  # from a choice's text so far and its index to its whole text

MIN_STEP_TOKENS = 1  # a step has up to two more, depending on the position only: resumed output has the same steps


def logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(-token / 7, 1, [((token + k) % EOS, -token / 7 - k) for k in range(top)])


@dataclass
class ScriptedEngine:
    """Has the interface of AsyncEngine. `fail_after`: the number of outputs before it fails."""

    tokenizer: Tokenizer
    script: Script
    state: EngineState = EngineState.READY
    cached: int = 3
    fail_after: int | None = None
    error: EmberlineError | None = None
    submissions: list[Submission] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    aborted: set[tuple[str, int]] = field(default_factory=set)
    ticket: dict[str, Any] | None = None
    drafted: int = 0  # drafted tokens that the last output of each completion reports
    accepted: int = 0
    drafts_per_token: int = 0  # drafted tokens that each output reports for each of its tokens, one of them accepted
    on_stats: Any = None
    clock: float = 0.0

    def now(self) -> float:
        self.clock += 0.001
        return self.clock

    def abort_completion(self, submission_id: str, index: int) -> None:
        self.aborted.add((submission_id, index))

    async def submit(self, submission: Submission, *, merges: bool = False) -> AsyncGenerator[Output, None]:
        self.submissions.append(submission)
        self.open.add(submission.id)
        try:
            for output in self._outputs(submission):
                await asyncio.sleep(0)
                if self.fail_after is not None:
                    self.fail_after -= 1
                    if self.fail_after < 0:
                        assert self.error is not None
                        raise self.error
                yield output
        finally:
            self.open.discard(submission.id)

    def _outputs(self, s: Submission) -> Any:
        if s.publish:
            yield from self._prefill_outputs(s)
            return
        targets = [self._target_tokens(s, i) for i in range(s.params.n)]
        written = [list(one) for one in s.resumed] or [[] for _ in targets]
        started = [bool(one) for one in written]
        live = list(range(len(targets)))
        while live:
            i = min(live, key=lambda i: (len(written[i]), i))
            if (s.id, i) in self.aborted:
                live.remove(i)
                counts = {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}
                yield Output(s.id, i, finish=FinishReason.ABORT, **counts)
                continue
            new: list[int] = []
            finish = self._finish_reason(s, written[i])  # the resumed tokens may end the choice already
            for _ in range(MIN_STEP_TOKENS + len(written[i]) % 3):
                if finish is None:
                    new.append(targets[i][len(written[i])])
                    written[i].append(new[-1])
                    finish = self._finish_reason(s, written[i])
            output = Output(s.id, i, new, finish=finish, timing=Timing(0.0, 0.0, 0.0, 1.0 if finish else None))
            if s.params.logprobs is not None:
                output.logprobs = [logprob(token, s.params.logprobs) for token in new]
            if not started[i] and s.params.prompt_logprobs is not None:
                output.prompt_logprobs = [logprob(token, s.params.prompt_logprobs) for token in s.prompt[1:]]
            output.cached_tokens = 0 if started[i] else self.cached
            started[i] = True
            if finish is not None:
                live.remove(i)
                output.drafted_tokens, output.accepted_tokens = self.drafted, self.accepted
            output.drafted_tokens += self.drafts_per_token * len(new)
            output.accepted_tokens += min(1, self.drafts_per_token) * len(new)
            yield output

    def _prefill_outputs(self, s: Submission) -> Any:
        if self.ticket is not None:
            yield Output(s.id, ticket=self.ticket)
        done = {"cached_tokens": self.cached, "timing": Timing(0.0, 1.0, 1.5, 1.5), "ticket": self.ticket}
        yield Output(s.id, 0, self._target_tokens(s, 0)[:1], finish=FinishReason.HANDOFF, **done)

    def _target_tokens(self, s: Submission, index: int) -> list[int]:
        before = self.tokenizer.decode(s.prompt, skip_special=False).rpartition("|")[2]
        whole = self.tokenizer.encode(self.script(before, index), add_special=False)
        return [*whole[len(self.tokenizer.encode(before, add_special=False)) :], EOS]

    def _finish_reason(self, s: Submission, written: list[int]) -> FinishReason | None:
        if written and written[-1] == EOS:
            return FinishReason.STOP
        max_tokens = s.params.max_tokens
        return FinishReason.LENGTH if max_tokens is not None and len(written) >= max_tokens else None


class WorkerHarness:
    def __init__(
        self,
        script: Script,
        tool_style: ToolStyle = HERMES,
        *,
        reasoning: ReasoningStyle = THINK,
        special_tokens: Sequence[str] = (),
        speculates: bool = False,
        **settings: Any,
    ) -> None:
        inner = byte_level()
        inner.add_special_tokens([AddedToken("<|end|>", special=True)])
        inner.add_tokens([AddedToken(marker, normalized=False) for marker in THINK.markers])
        inner.add_special_tokens([AddedToken(marker, special=True) for marker in special_tokens])
        self.tokenizer = Tokenizer(inner)
        self.engine = ScriptedEngine(self.tokenizer, script)
        engine = cast("AsyncEngine", self.engine)
        prompts = PromptBuilder(self.tokenizer, ChatTemplate({"default": TEMPLATE}, {}), tool_style, 4000)
        self.metrics = ModelMetrics("m")
        style: dict[str, Any] = {"tool_style": tool_style, "reasoning": reasoning, "speculates": speculates}
        checker = cast("GrammarChecker", self)
        generator = Generator(engine, prompts, checker, self.metrics, served_name="m", timeout=60.0, **style)
        self.catalog = ModelCatalog([LoadedModel("m", generator, checker, self.metrics, "fp")])
        config = ServerConfig(models={"m": "m"}, embedder=None, worker=WorkerConfig(("http://router",)), **settings)
        self.app = EngineApp(config, engine, self.catalog, None, {})

    async def check(self, grammar: GrammarSpec, param: str, tenant: str) -> None:
        """Accept every grammar, in place of GrammarChecker."""

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return asyncio.run(self.post_async(path, body, **headers))

    async def post_async(self, path: str, body: Any, client: str = "127.0.0.1", **headers: str) -> Answer:
        answer = Answer()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content_type": "application/json", **headers}
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": pairs, "client": (client, 1)}
        inbox = [{"type": "http.request", "body": raw}]

        async def receive() -> dict[str, Any]:
            return inbox.pop() if inbox else await asyncio.Future()

        try:
            await self.app(scope, receive, answer.send)
        except ReplyInterrupted:
            answer.cut = True
        assert not self.engine.open, "a submission is still open"
        return answer


class Answer:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.ended = False
        self.cut = False  # the connection was closed within the reply

    async def send(self, message: dict[str, Any]) -> None:
        assert not self.ended
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.writes.append(message["body"])
            self.ended = not message.get("more_body", False)

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    @property
    def json(self) -> Any:
        return json.loads(self.body)
