"""A reply that goes on at another worker is, to the byte, the reply that never moved: wherever it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_engine import Answer, WorkerHarness
from tracked_streams import Group, envelope, events_of, groups_of, name_of

from emberline.core.errors import DeadlineExceeded, EngineFailed
from emberline.core.handoff import TokenGroup

UMLAUT = "Grüße, 你好 🔥 STO and then STOP it, never said"
THOUGHT = "<think>\nhm, über 2 things</think>\n\nParis, naturally."
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
ALL = "<think>two ciities, then</think>" + CALLS
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
FLAT = {"type": "function", "name": "weather", "parameters": WEATHER}
QUESTION = [{"role": "user", "content": "why"}]
CHAT: dict[str, Any] = {"model": "m", "messages": QUESTION, "stream": True}
TEXT: dict[str, Any] = {"model": "m", "prompt": "why|", "stream": True}
RESPONSE: dict[str, Any] = {"model": "m", "input": "why", "stream": True}
MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 300, "messages": QUESTION, "stream": True}
THINKS = {"type": "enabled", "budget_tokens": 20}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BOTH = ["message.output_text.logprobs", "reasoning.encrypted_content"]


def generate_endlessly(before: str, index: int) -> str:
    """Thinks until it is stopped, then answers."""
    return before + (" Paris." if "</think>" in before else "<think>" + "abcdefghij" * 9)


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "text": ("/v1/chat/completions", UMLAUT, CHAT),
    "text, stopped": ("/v1/chat/completions", UMLAUT, CHAT | {"stop": ["STOP"]} | USAGE),
    "text, too long": ("/v1/chat/completions", UMLAUT, CHAT | {"max_tokens": 9} | USAGE),
    "several, with usage": ("/v1/chat/completions", [UMLAUT, THOUGHT, "no"], CHAT | {"n": 3} | USAGE),
    "several, one stopped": ("/v1/chat/completions", [UMLAUT, "a STOP b", THOUGHT], CHAT | {"n": 3, "stop": "STOP"}),
    "reasoning": ("/v1/chat/completions", THOUGHT, CHAT | USAGE),
    "reasoning, logprobs": ("/v1/chat/completions", THOUGHT, CHAT | {"logprobs": True, "top_logprobs": 2}),
    "tools": ("/v1/chat/completions", ALL, CHAT | {"tools": [TOOL]}),
    "tools, logprobs": ("/v1/chat/completions", ALL, CHAT | {"tools": [TOOL], "logprobs": True}),
    "several, tools": ("/v1/chat/completions", [ALL, CALLS], CHAT | {"tools": [TOOL], "n": 2} | USAGE),
    "plain": ("/v1/completions", UMLAUT, TEXT | {"max_tokens": 40}),
    "plain, several": ("/v1/completions", [UMLAUT, "so"], TEXT | {"n": 2, "max_tokens": 50, "stop": ["STOP"]} | USAGE),
    "plain, prompts": ("/v1/completions", [UMLAUT, "so"], TEXT | {"prompt": ["a|", "bcd|"], "n": 2, "max_tokens": 50}),
    "plain, logprobs": ("/v1/completions", UMLAUT, TEXT | {"logprobs": 2, "max_tokens": 50}),
    "plain, echo": ("/v1/completions", ["one", UMLAUT], TEXT | {"echo": True, "n": 2, "logprobs": 1, "max_tokens": 30}),
    "response": ("/v1/responses", UMLAUT, RESPONSE),
    "response, tools": ("/v1/responses", ALL, RESPONSE | {"tools": [FLAT]}),
    "response, all": ("/v1/responses", THOUGHT, RESPONSE | {"include": BOTH, "top_logprobs": 2}),
    "response, too long": ("/v1/responses", UMLAUT, RESPONSE | {"max_output_tokens": 17}),
    "message": ("/v1/messages", UMLAUT, MESSAGE | {"stop_sequences": ["STOP"]}),
    "message, tools": ("/v1/messages", ALL, MESSAGE | {"tools": [{"name": "weather", "input_schema": WEATHER}]}),
    "message, budget": ("/v1/messages", generate_endlessly, MESSAGE | {"thinking": THINKS}),
    "message, budget and no room":
        ("/v1/messages", generate_endlessly, MESSAGE | {"max_tokens": 21, "thinking": THINKS}),
    "message, budget, stop":
        ("/v1/messages", generate_endlessly, MESSAGE | {"stop_sequences": ["/think>"], "thinking": THINKS}),
}  # fmt: skip


def house_of(script: Any) -> WorkerHarness:
    if callable(script):
        return WorkerHarness(script)
    return WorkerHarness(
        lambda before, index: before + (script if isinstance(script, str) else script[index % len(script)])
    )


def groups(answer: Answer) -> list[Group]:
    """Each is a write of its own."""
    found = groups_of(answer.body)
    assert all(write.endswith(group.events) for group, write in zip(found, answer.writes, strict=True))
    return found


@pytest.mark.parametrize("case", CASES)
def test_stream_resumes_to_the_byte_after_any_cut(case: str) -> None:
    path, script, body = CASES[case]
    house = house_of(script)
    house.engine.drafts_per_token = 2  # which the usage reports
    answer = house.post(path, body, x_emberline_track="1", x_emberline_seed="7")
    whole = groups(answer)
    assert answer.status == 200 and answer.ended and len(whole) > 5
    assert whole[0].cached is not None and whole[-1].said == TokenGroup(0, ())
    name = name_of(events_of(whole))
    # Two choices with tool calls are the longest reply: every third cut of it is after a token of each choice in turn.
    for cut in range(0, len(whole), 3 if case == "several, tools" else 1):
        told, rest = whole[:cut], whole[cut:]
        again = groups(house.post("/cluster/resume", envelope(path, body, told, name)))
        if isinstance(body.get("prompt"), list):  # who of several comes first is a matter of chance
            again, rest = sorted(again, key=choice_of), sorted(rest, key=choice_of)
        assert [(group.said, group.events) for group in again] == [(group.said, group.events) for group in rest], cut


def test_usage_has_the_drafts_of_all_workers() -> None:
    path, script, body = CASES["several, with usage"]
    house = house_of(script)
    house.engine.drafts_per_token = 2
    whole = groups(house.post(path, body, x_emberline_track="1"))
    engine_drafts = []
    for drafts_per_token in (2, 5, 0):  # of the worker that continues after half of the groups
        house.engine.drafts_per_token = drafts_per_token
        rest = house.post("/cluster/resume", envelope(path, body, whole[: len(whole) // 2], name_of(events_of(whole))))
        usage = json.loads(rest.body.split(b"data: ")[-2])["usage"]
        details = usage["completion_tokens_details"]
        accepted, rejected = (details.get(f"{kind}_prediction_tokens", 0) for kind in ("accepted", "rejected"))
        engine_drafts.append((accepted / usage["completion_tokens"], rejected / usage["completion_tokens"]))
    assert engine_drafts[0] == (1, 1)
    assert engine_drafts[1][0] == 1 and 1 < engine_drafts[1][1] < 4
    assert 0 < engine_drafts[2][0] == engine_drafts[2][1] < 1


def choice_of(group: Group) -> tuple[bool, int]:
    return group.said == TokenGroup(0, ()), group.said.index


@pytest.mark.parametrize("case", CASES)
def test_token_comments_only_for_tracked_streams(case: str) -> None:
    path, script, body = CASES[case]
    house = house_of(script)
    whole = groups(house.post(path, body, x_emberline_track="1"))
    plain = house.post(path, body)
    told = events_of(whole)
    assert b": said" not in plain.body and b": cached" not in plain.body
    (old, then), (new, now) = name_of(told), name_of(plain.body)
    bare = [one.removeprefix("chatcmpl-").removeprefix("cmpl-").partition("_")[2] or one for one in (old, new)]
    renamed = plain.body.replace(bare[1].encode(), bare[0].encode()).replace(str(now).encode(), str(then).encode())
    if "tools" not in case and "prompts" not in case:
        assert renamed == told
    assert len(renamed) == len(told)


def test_tool_call_ids_follow_from_reply_id() -> None:
    path, script, body = CASES["several, tools"]
    house = house_of(script)
    ids = []
    for name in ("chatcmpl-a", "chatcmpl-a", "chatcmpl-b"):
        answer = house.post("/cluster/resume", envelope(path, body, [], (name, 1)))
        events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]
        calls = [c for e in events for choice in e["choices"] for c in choice["delta"].get("tool_calls", ())]
        ids.append([call["id"] for call in calls if "id" in call])
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 8 and all(len(one) == len("call_") + 24 for one in ids[0])


def test_opening_event_is_not_repeated() -> None:
    path, script, body = CASES["response"]
    house = house_of(script)
    whole = events_of(groups(house.post(path, body, x_emberline_track="1")))
    opened = envelope(path, body, [], name_of(whole)) | {"handoff": {"started": True}}
    rest = events_of(groups(house.post("/cluster/resume", opened)))
    assert rest.startswith(b"event: response.output_item.added") and whole.endswith(rest)


def test_resume_without_stream() -> None:
    path, script, body = CASES["message, tools"]
    house = house_of(script)
    answer = house.post("/cluster/resume", envelope(path, body | {"stream": False}, []))
    assert answer.json["stop_reason"] == "tool_use" and answer.json["usage"]["cache_read_input_tokens"] == 3


def test_router_seed_applies_without_client_seed() -> None:
    house = house_of("yes")
    house.post("/v1/chat/completions", CHAT, x_emberline_seed="18446744073709551615")
    house.post("/v1/chat/completions", CHAT | {"seed": 5}, x_emberline_seed="8")
    house.post("/cluster/resume", envelope("/v1/chat/completions", CHAT, []))
    house.post("/v1/chat/completions", CHAT)
    assert [s.params.seed for s in house.engine.submissions] == [2**64 - 1, 5, 7, None]
    for wrong in ("-1", "18446744073709551616", "x", "1.0", "\xb2"):
        assert house.post("/v1/chat/completions", CHAT, x_emberline_seed=wrong).status == 400


def test_resumed_usage_equals_uninterrupted_usage() -> None:
    """The engine is asked for what is missing, with all that is known and the time that is left."""
    path, script, body = CASES["text, stopped"]
    house = house_of(script)
    whole = groups(house.post(path, body, x_emberline_track="1"))
    house.post("/cluster/resume", envelope(path, body, whole[:4], timeout=12.5))
    asked = house.engine.submissions[-1]
    assert asked.resumed == (tuple(t for group in whole[:4] for t in group.said.tokens),)
    assert 12.4 < asked.timeout < 12.5 and asked.prompt == house.engine.submissions[0].prompt


def test_reasoning_budget_survives_resume() -> None:
    path, script, body = CASES["message, budget"]
    house = house_of(script)
    whole = groups(house.post(path, body, x_emberline_track="1"))
    at = [group.said.tokens for group in whole].index((house.tokenizer.token_id("</think>"),))
    _, second = house.engine.submissions
    for cut, asked in ((at - 1, 2), (at, 1), (at + 1, 1), (at + 2, 1)):
        house.engine.submissions.clear()
        house.post("/cluster/resume", envelope(path, body, whole[:cut], ("msg_1", None)))
        assert len(house.engine.submissions) == asked
        last = house.engine.submissions[-1]
        assert last.prompt == second.prompt and last.params.max_tokens == second.params.max_tokens
        assert bool(last.resumed) == (cut == at + 2)


def test_finished_reply_resumes_without_engine() -> None:
    for case in ("text", "several, with usage", "message, budget, stop"):
        path, script, body = CASES[case]
        house = house_of(script)
        whole = groups(house.post(path, body, x_emberline_track="1"))
        asked = len(house.engine.submissions)
        again = house.post("/cluster/resume", envelope(path, body, whole[:-1], ("msg_1", 1)))
        assert len(house.engine.submissions) == asked and len(again.writes) == 1


def test_engine_death_aborts_tracked_stream() -> None:
    """So that it can go on elsewhere; who is not followed is told, and so is who is to blame."""
    house = house_of(UMLAUT)
    for error, headers, broken in (
        (EngineFailed("gone"), {"x_emberline_track": "1"}, True),
        (EngineFailed("gone"), {}, False),
        (DeadlineExceeded("late"), {"x_emberline_track": "1"}, False),
    ):
        house.engine.fail_after, house.engine.error = 4, error
        answer = house.post("/v1/chat/completions", CHAT, **headers)
        assert answer.status == 200 and answer.ended is not broken and (b'"error"' in answer.body) is not broken
        assert answer.cut is broken
        if headers:
            assert groups(answer)
    house.engine.fail_after = 0
    assert house.post("/v1/chat/completions", CHAT, x_emberline_track="1").status == 504
