"""thinking.budget_tokens: longer reasoning is closed, and the client sees one reply.

The tests use the real engine loop and a fake model that reasons until its reasoning is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from bytelevel import EOS, VOCAB_SIZE, build, byte_level, tokenizer_file
from tokenizers import AddedToken

from emberline.api.anthropic import reply as anthropic_reply
from emberline.api.anthropic import request as anthropic
from emberline.api.reasoning import THINK, constrain_after_reasoning, constrain_answer
from emberline.api.tool_styles.registry import HERMES
from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import DeadlineExceeded, Overloaded
from emberline.core.events import Output, Stats
from emberline.core.params import GrammarSpec
from emberline.core.plan import WorkItem
from emberline.core.request import Submission
from emberline.engine.async_engine import AsyncEngine
from emberline.engine.engine import Engine
from emberline.engine.fake import FakeRunner
from emberline.engine.grammar import GrammarCompiler
from emberline.server.metrics import ModelMetrics, render_exposition
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer
from emberline.wire.deltas import Delta, Finish, ReasoningDelta, ReplyStart, StreamStart, TextDelta, UsageUpdate
from emberline.wire.usage import EngineUsage
from emberline.worker.generator import Generator
from emberline.worker.grammar_checker import GrammarChecker
from emberline.worker.prompt_builder import PromptBuilder
from emberline.worker.request_context import RequestContext

QUESTION = "What is the capital of France, and why?"
OPENED = "{{ messages[0].content }}|{% if enable_thinking %}<think>{% endif %}{{ '</think>' if false }}"
FREE = "{{ messages[0].content }}|{{ '</think>' if enable_thinking is none }}"
ANSWER = "\n\nParis, as ever."


class ReasoningRunner(FakeRunner):
    """Writes `lead_group`, then reasoning without end or of `reasoning_chars` characters, then an answer."""

    def __init__(self, tokenizer: Tokenizer, lead: str = "", reasoning_chars: int | None = None) -> None:
        super().__init__(vocab_size=tokenizer.vocab_size, eos=frozenset({EOS}))
        self._tokenizer, self._lead, self._reasoning_chars = tokenizer, lead, reasoning_chars

    def _sample_token(self, work: WorkItem, length: int) -> int:
        flat = [t for block in work.blocks for t in self._memory[self._slots_of_block(block)]][:length]
        reply = self._tokenizer.decode(flat, skip_special=False).partition("|")[2]
        reasoning_text, closed, answer = reply.partition("</think>")
        reasoning_text = reasoning_text.removeprefix("<think>") if reply.startswith("<think>") else reasoning_text
        if not closed and len(reply) < len(self._lead):
            return self._tokenizer.encode(self._lead[len(reply) :], add_special=False)[0]
        if not closed and self._reasoning_chars is not None and len(reasoning_text) >= self._reasoning_chars:
            return self._tokenizer.encode(
                "</think>"[reasoning_text.count("<") and len(reasoning_text) - self._reasoning_chars :], False
            )[0]
        if not closed:
            return self._tokenizer.encode("abcdefghij"[len(reasoning_text) % 10], add_special=False)[0]
        return self._tokenizer.encode(ANSWER[len(answer)], add_special=False)[0] if len(answer) < len(ANSWER) else EOS


class InProcessEngine:
    """An AsyncEngine without the engine process: waiting for an output runs the engine's steps."""

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        self.engine, self.clock = engine, clock
        self.submissions: list[Submission] = []
        self.before_step: Callable[[], None] = lambda: None
        self._open: dict[str, deque[Output]] = {}

    def now(self) -> float:
        return self.clock.now()

    async def submit(self, submission: Submission, *, merges: bool = False) -> AsyncGenerator[Output, None]:
        self.engine.add(submission)
        self.submissions.append(submission)
        inbox = self._open[submission.id] = deque()
        ended = False
        try:
            while not ended:
                while not inbox:
                    await asyncio.sleep(0)
                    self.before_step()
                    for output in self.engine.step():
                        if output.id in self._open:
                            self._open[output.id].append(output)
                output = inbox.popleft()
                ended = output.finish is not None
                yield output
        finally:
            del self._open[submission.id]
            if not ended:
                self.engine.abort(submission.id)

    def abort_completion(self, submission_id: str, index: int) -> None:
        self.engine.abort_completion(submission_id, index)


class BudgetHarness:
    def __init__(self, *, template: str = OPENED, marked: bool = True, context: int = 500, **runner: Any) -> None:
        inner = byte_level()
        inner.add_special_tokens([AddedToken("<|end|>", special=True)])
        if marked:
            inner.add_tokens([AddedToken(marker, normalized=False) for marker in THINK.markers])
        self.tokenizer = Tokenizer(inner)
        self.clock, self.metrics = ManualClock(100.0), ModelMetrics("m")
        self.checked: list[GrammarSpec] = []
        config = SchedulerConfig(max_context=context, max_running=1, max_waiting=1)
        self.engine = InProcessEngine(Engine(config, ReasoningRunner(self.tokenizer, **runner), self.clock), self.clock)
        self.prompts = PromptBuilder(self.tokenizer, ChatTemplate({"default": template}, {}), HERMES, context)
        self.generator = Generator(
            cast("AsyncEngine", self.engine),
            self.prompts,
            cast("GrammarChecker", self),
            self.metrics,
            served_name="m",
            tool_style=HERMES,
            reasoning=THINK,
            timeout=60.0,
        )

    async def check(self, grammar: GrammarSpec, param: str, tenant: str) -> None:
        """Record the grammar, in place of GrammarChecker."""
        self.checked.append(grammar)

    def ask(self, budget: int, **fields: Any) -> anthropic.MessagesCall:
        thinking = {"type": "enabled", "budget_tokens": budget}
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": "m", "max_tokens": 300, "thinking": thinking, "messages": messages, **fields}
        return anthropic.parse(json.dumps(body).encode())

    async def deltas(self, budget: int, **fields: Any) -> AsyncGenerator[Delta, None]:
        async with aclosing(self.generator.generate(self.ask(budget, **fields), RequestContext())) as groups:
            async for group in groups:
                for delta in group.deltas:
                    yield delta

    def reply(self, budget: int, **fields: Any) -> list[Delta]:
        async def collect() -> list[Delta]:
            async with aclosing(self.deltas(budget, **fields)) as deltas:
                return [delta async for delta in deltas]

        deltas = asyncio.run(collect())
        assert (
            isinstance(deltas[0], ReplyStart) and isinstance(deltas[-1], UsageUpdate) and isinstance(deltas[-2], Finish)
        )
        assert sum(isinstance(delta, Finish | ReplyStart | UsageUpdate) for delta in deltas) == 3
        self.check_empty()
        return deltas

    def check_empty(self) -> None:
        self.engine.engine.step()
        assert self.engine.engine.idle
        stats = self.engine.engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total

    def finished(self) -> int:
        text = render_exposition(self.metrics.families(Stats(), restart_count=0, is_ready=True, block_size=16))
        lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
        return sum(int(line.rpartition(" ")[2]) for line in lines)


def reasoning_text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def finish_of(deltas: list[Delta]) -> tuple[str, str | None]:
    finish = deltas[-2]
    assert isinstance(finish, Finish)
    return finish.reason, finish.stop_sequence


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("template", [OPENED, FREE])
def test_budget_closes_reasoning_and_reply_continues(marked: bool, template: str) -> None:
    harness = BudgetHarness(template=template, marked=marked, lead="" if template == OPENED else "<think>")
    deltas = harness.reply(23, temperature=0.5, top_k=7)
    lead = 0 if template == OPENED else 1 if marked else len("<think>")
    assert reasoning_text(deltas) == "abcdefghijabcdefghijabc" and text(deltas) == ANSWER.strip()
    assert finish_of(deltas) == ("stop", None)
    first, second = harness.engine.submissions
    closing = 1 if marked else len("</think>")
    tail = harness.tokenizer.decode(second.prompt[len(first.prompt) :], skip_special=False)
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert tail == ("<think>" if lead else "") + "abcdefghijabcdefghijabc</think>"
    assert second.params.max_tokens == 300 - lead - 23 - closing
    assert (second.params.temperature, second.params.top_k, second.params.n) == (0.5, 7, 1)
    assert deltas[0] == ReplyStart(len(first.prompt))
    written = lead + 23 + closing + len(ANSWER) + 1
    assert deltas[-1] == UsageUpdate(EngineUsage(input=len(first.prompt), output=written, cached_read=0, reasoning=23))
    assert harness.engine.engine.stats().prefix_hits > 0  # the second part did not compute the prompt again
    assert harness.finished() == 1


def test_message_has_one_thinking_and_one_text_block() -> None:
    harness = BudgetHarness()
    for stream in (False, True):
        call = harness.ask(12, stream=stream)
        writer = anthropic_reply.make_writer(call, "id", 1, "fp")
        events = b"".join([writer.write(delta) for delta in (StreamStart(), *harness.reply(12))])
        body = writer.body()
        assert [block["type"] for block in body["content"]] == ["thinking", "text"]
        assert body["content"][0]["thinking"] == "abcdefghijab" and body["content"][1]["text"] == ANSWER.strip()
        assert body["stop_reason"] == "end_turn"
        assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 12}
        assert events.count(b"event: content_block_start") == (2 if stream else 0)


@pytest.mark.parametrize("marked", [True, False])
def test_reasoning_within_budget_is_unchanged(marked: bool) -> None:
    harness = BudgetHarness(marked=marked, reasoning_chars=9)
    deltas = harness.reply(30)
    assert (
        reasoning_text(deltas) == "abcdefghi"
        and text(deltas) == ANSWER.strip()
        and len(harness.engine.submissions) == 1
    )


def test_output_without_reasoning_is_unchanged() -> None:
    harness = BudgetHarness(template=FREE, lead="Plain words, and then more and more of them: ")
    deltas = harness.reply(1, max_tokens=60)
    assert (
        reasoning_text(deltas) == "" and finish_of(deltas) == ("length", None) and len(harness.engine.submissions) == 1
    )


def test_marker_held_back_as_stop_string_is_not_repeated() -> None:
    harness = BudgetHarness(reasoning_chars=9)
    deltas = harness.reply(9, stop_sequences=["</think>!"])
    assert len(harness.engine.submissions) == 2  # the budget is spent before the model closes the reasoning
    assert text(deltas) == ANSWER.strip()
    harness = BudgetHarness(reasoning_chars=9)
    deltas = harness.reply(10, stop_sequences=["</think>!"])
    assert len(harness.engine.submissions) == 1 and text(deltas) == ANSWER.strip()


@pytest.mark.parametrize(("most", "context"), [(21, 500), (300, len(QUESTION) + 2 + 21)])
def test_reply_ends_at_budget_without_tokens_for_answer(most: int, context: int) -> None:
    harness = BudgetHarness(context=context)
    deltas = harness.reply(20, max_tokens=most)
    assert reasoning_text(deltas) == "abcdefghij" * 2 and text(deltas) == "" and finish_of(deltas) == ("length", None)
    assert len(harness.engine.submissions) == 1 and harness.finished() == 1


def test_remaining_max_tokens_limit_the_answer() -> None:
    harness = BudgetHarness()
    deltas = harness.reply(20, max_tokens=20 + 1 + 7)
    assert text(deltas) == "Paris" and finish_of(deltas) == ("length", None)
    assert isinstance(deltas[-1], UsageUpdate) and deltas[-1].usage.output == 28


@pytest.mark.parametrize(
    ("stop", "parts", "thinks", "says"),
    [
        ("ever", 2, "abcdefghijab", "Paris, as "),
        ("</think>", 1, "abcdefghijab", ""),
        ("b</th", 1, "abcdefghija", ""),
        ("ghi", 1, "abcdef", ""),
    ],
)
def test_stop_strings_before_within_and_after_marker(stop: str, parts: int, thinks: str, says: str) -> None:
    harness = BudgetHarness()
    deltas = harness.reply(12, stop_sequences=[stop])
    assert (reasoning_text(deltas), text(deltas), finish_of(deltas)) == (thinks, says, ("stop", stop))
    assert len(harness.engine.submissions) == parts and harness.finished() == 1


@pytest.mark.parametrize("num_deltas", [1, 8, 13, 15, 17])
def test_client_disconnect_frees_all_requests(num_deltas: int) -> None:
    harness = BudgetHarness()

    async def leave() -> None:
        async with aclosing(harness.deltas(12)) as deltas:
            for _ in range(num_deltas):
                await anext(deltas)

    asyncio.run(leave())
    harness.check_empty()
    assert len(harness.engine.submissions) == (2 if num_deltas > 14 else 1)


def test_both_parts_share_the_time_limit() -> None:
    harness = BudgetHarness()
    harness.engine.before_step = lambda: harness.clock.advance(2.0)
    with pytest.raises(DeadlineExceeded):
        harness.reply(25)
    harness.check_empty()
    first, second = harness.engine.submissions
    assert first.timeout == 60.0 and second.timeout == 10.0


def test_timing_covers_both_parts() -> None:
    harness = BudgetHarness()
    harness.engine.before_step = lambda: harness.clock.advance(1.0)
    harness.reply(12)
    text = render_exposition(harness.metrics.families(Stats(), restart_count=0, is_ready=True, block_size=16))
    sums = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if "_seconds_sum" in line}
    steps = 12 + len(ANSWER) + 1
    assert sums["vllm:e2e_request_latency_seconds_sum"] == steps and sums["vllm:time_to_first_token_seconds_sum"] == 1.0


def test_rejected_second_part_fails_the_reply() -> None:
    harness = BudgetHarness()

    async def collect_rejected() -> None:
        async with aclosing(harness.deltas(12)) as deltas:
            async for delta in deltas:
                if isinstance(delta, ReasoningDelta) and len(harness.engine.submissions) == 1:
                    harness.engine.engine.config = SchedulerConfig(max_running=1, max_waiting=1)
                    object.__setattr__(harness.engine.engine.config, "max_running", -1)

    with pytest.raises(Overloaded):
        asyncio.run(collect_rejected())
    harness.check_empty()


def test_full_queue_accepts_the_second_part() -> None:
    """The second part takes the place of the first in the queue."""
    harness = BudgetHarness()

    async def crowd() -> None:
        first = harness.deltas(12)
        await anext(first)
        others = [harness.deltas(12) for _ in range(2)]
        waiting = [asyncio.ensure_future(anext(each)) for each in others]
        async with asyncio.timeout(60):
            while not (len(harness.engine.submissions) == 2 and any(task.done() for task in waiting)):
                await asyncio.sleep(0)
        deltas = [delta async for delta in first]
        assert isinstance(deltas[-1], UsageUpdate) and text(deltas) == ANSWER.strip()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) == 1
        for each in others:
            await each.aclose()

    asyncio.run(crowd())
    harness.check_empty()


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}


def test_format_applies_after_the_marker() -> None:
    harness = BudgetHarness()
    harness.reply(12, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    schema_grammar = GrammarSpec("json_schema", json.dumps(SCHEMA, separators=(",", ":")))
    special = {marker: harness.tokenizer.token_id(marker) or 0 for marker in THINK.markers}
    grammars = [constrain_after_reasoning(schema_grammar, THINK, True, special), constrain_answer(schema_grammar)]
    assert [submission.params.grammar for submission in harness.engine.submissions] == grammars == harness.checked


def test_grammar_after_the_marker(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tokenizer_file(tmp_path), VOCAB_SIZE, [EOS])

    def takes(text: str) -> bool:
        matcher = compiler.compile(constrain_answer(GrammarSpec("json_schema", json.dumps(SCHEMA))))
        return all(matcher.accept(token) for token in build().encode(text).ids) and EOS in matcher.allowed_tokens()

    assert takes('{"a": 1}') and takes('\n\n{"a": 1}')
    assert not takes('more</think>{"a": 1}') and not takes('\n\n{"a": 2}') and not takes("\n\n")
    broken = GrammarSpec("json_schema", "{")
    assert constrain_answer(broken) is broken
