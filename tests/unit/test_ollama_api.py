"""Ollama's API on the engine: the fields of requests, the lines of streams, whole replies and errors."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from scripted_engine import Answer, WorkerHarness

from emberline.api.ollama import embed, models
from emberline.api.ollama.request import parse_chat, parse_generate
from emberline.api.reasoning import THINK
from emberline.core.errors import InvalidRequest
from emberline.wire.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    ReplyStart,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    UsageUpdate,
)
from emberline.wire.ollama import OllamaWriter, render_chat_fields, render_generate_fields
from emberline.wire.usage import Usage

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def make_worker(text: str = "abc") -> WorkerHarness:
    return WorkerHarness(lambda before, index: before + text)


def chat(worker: WorkerHarness, **fields: Any) -> Answer:
    return worker.post("/api/chat", {"model": "m", "messages": [USER], **fields})


def read_lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


def parse(**fields: Any) -> Any:
    return parse_chat(json.dumps({"messages": [USER], **fields}).encode())


# -- replies --------------------------------------------------------------------------------------------------------


def test_chat_streams_lines_unless_told_otherwise() -> None:
    *parts, last = read_lines(chat(make_worker()))
    assert "".join(part["message"]["content"] for part in parts) == "abc"
    assert all(part["model"] == "m" and part["done"] is False for part in parts)
    assert last["done"] is True and last["done_reason"] == "stop"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["eval_count"] == 4  # three letters and the end token
    assert all(last[name] > 0 for name in ("total_duration", "prompt_eval_count", "eval_duration"))


def test_whole_reply_is_the_joined_stream() -> None:
    answer = chat(make_worker(), stream=False)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["message"] == {"role": "assistant", "content": "abc"}
    assert answer.json["done_reason"] == "stop"


def test_generate_uses_the_chat_template_unless_raw() -> None:
    worker = make_worker()
    request = {"model": "m", "prompt": "question", "stream": False}
    assert worker.post("/api/generate", request).json["response"] == "abc"
    worker.post("/api/generate", {**request, "raw": True})
    templated, raw = (worker.tokenizer.decode(s.prompt, skip_special=False) for s in worker.engine.submissions)
    assert (templated, raw) == ("question|", "question")  # the harness's template ends with a bar
    body = json.dumps({**request, "system": "be brief"}).encode()
    assert [message["content"] for message in parse_generate(body).messages] == ["be brief", "question"]


def test_tool_call_has_object_arguments_in_one_line() -> None:
    *parts, last = read_lines(chat(make_worker(CALL), tools=[TOOL]))
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [{"index": 0, "name": "weather", "arguments": {"city": "Paris"}}]
    assert last["done_reason"] == "stop"
    whole = chat(make_worker(CALL), tools=[TOOL], stream=False).json["message"]
    assert whole["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"} and whole["content"] == ""


def test_cut_off_tool_call_is_left_out() -> None:
    deltas = [StreamStart(), ReplyStart(1), ToolCallStart(0, "c", "weather"), ToolCallArguments(0, '{"city": "Pa')]
    reply = play([*deltas, Finish("length"), UsageUpdate(Usage(input=1, output=2)), StreamEnd()], stream=False)
    assert "tool_calls" not in reply["message"] and reply["done_reason"] == "length"


def play(deltas: list[Delta], *, stream: bool, renders: Any = render_chat_fields) -> Any:
    ticks = count(1000, 50)
    writer = OllamaWriter("m", 0, renders, stream=stream, now_ns=lambda: next(ticks))
    written = b"".join(writer.write(delta) for delta in deltas)
    return [json.loads(line) for line in written.splitlines()] if stream else writer.body()


def test_durations_are_nanoseconds_between_the_deltas() -> None:
    deltas: list[Delta] = [StreamStart(), ReplyStart(7), ReasoningDelta("r"), TextDelta("t"), Finish("length")]
    deltas += [UsageUpdate(Usage(input=7, output=3)), StreamEnd()]
    for renders, thinking in ((render_chat_fields, True), (render_generate_fields, False)):
        lines = play(deltas, stream=True, renders=renders)
        assert (lines[0]["message"] if thinking else lines[0])["thinking"] == "r"
        end = lines[-1]
        assert (end["total_duration"], end["prompt_eval_duration"], end["eval_duration"]) == (100, 50, 50)
        assert (end["prompt_eval_count"], end["eval_count"], end["done_reason"]) == (7, 3, "length")
        assert end["created_at"] == "1970-01-01T00:00:00.000000Z"


def test_thinking_is_apart_from_the_content() -> None:
    worker = WorkerHarness(lambda before, index: before + "<think>why</think>so", reasoning=THINK)
    message = chat(worker, stream=False, think=True).json["message"]
    assert (message["thinking"], message["content"]) == ("why", "so")


def test_logprobs_are_listed_for_each_token() -> None:
    *parts, _ = read_lines(chat(make_worker(), logprobs=True, top_logprobs=1))
    assert [entry["token"] for part in parts for entry in part["logprobs"]][:3] == ["a", "b", "c"]


def test_request_without_messages_loads_the_model() -> None:
    worker = make_worker()
    reply = worker.post("/api/chat", {"model": "m:latest"}).json
    assert reply["done_reason"] == "load" and reply["model"] == "m:latest"
    assert worker.post("/api/generate", {"model": "m", "keep_alive": 0}).json["done"] is True
    assert worker.post("/api/generate", {"model": "other"}).status == 404
    assert worker.engine.submissions == []


# -- requests -------------------------------------------------------------------------------------------------------


def test_options_become_sampling_parameters() -> None:
    worker = make_worker()
    options = {"temperature": 0.5, "top_p": 0.7, "top_k": 3.0, "seed": 7, "num_predict": 2, "stop": "x"}
    answer = chat(worker, options={**options, "repeat_penalty": 1.2, "num_ctx": 512, "mirostat": 1}, keep_alive="5m")
    params = worker.engine.submissions[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.7, 3, 7)
    assert (params.max_tokens, params.repetition_penalty) == (2, 1.2)
    assert answer.headers["x-emberline-ignored"] == "keep_alive, options.num_ctx, options.mirostat"


def test_unknown_fields_never_stop_a_request() -> None:
    answer = chat(make_worker(), options={"new_topic_penalty": 1}, private={"a": 1})
    assert answer.status == 200
    assert answer.headers["x-emberline-ignored"] == "options.new_topic_penalty, private"


def test_unset_options_have_the_defaults_of_ollama() -> None:
    params = parse().params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.8, 40, 0.9, None)
    assert parse(options={"num_predict": -1}).params.max_tokens is None
    assert parse(options={"top_p": 0}).params.greedy
    for penalty in (0, -0.5):  # an OpenAI frequency_penalty that a client has renamed
        assert parse(options={"repeat_penalty": penalty, "seed": -1}).params.repetition_penalty == 1.0
    unset = parse(options={"top_k": 5, "num_predict": 9, "repeat_penalty": 1.0}).unset_params
    assert unset == {"temperature", "top_p", "min_p"}


def test_format_is_json_or_a_schema() -> None:
    assert parse(format="json").params.grammar.kind == "json_object"
    assert json.loads(parse(format={"type": "object"}).params.grammar.text) == {"type": "object"}
    assert parse(format="").params.grammar is None
    with pytest.raises(InvalidRequest, match="format is 'xml'"):
        parse(format="xml")


def test_tool_results_find_their_calls_without_ids() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_name": "b", "content": "2"}, {"role": "tool", "content": "1"}]
    messages = parse(messages=[USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]).messages
    assert [(m["name"], m["content"]) for m in messages if m["role"] == "tool"] == [("b", "2"), ("a", "1")]
    unknown_id = {"role": "tool", "tool_call_id": "call_of_another_api", "content": "1"}
    messages = parse(messages=[USER, {"role": "assistant", "tool_calls": calls[:1]}, unknown_id]).messages
    assert messages[-1]["name"] == "a"


def test_arguments_may_be_json_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    messages = parse(messages=[USER, {"role": "assistant", "tool_calls": [call]}, result]).messages
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_last_assistant_message_is_continued() -> None:
    assert parse(messages=[USER, {"role": "assistant", "content": "So"}]).continues_last_message


def test_tools_of_other_kinds_are_left_out() -> None:
    call = parse(tools=[TOOL, {"type": "web_search"}])
    assert [tool.name for tool in call.tools] == ["weather"]
    assert call.ignored.unknown == ("tools[web_search]",)


@pytest.mark.parametrize("think", [True, False, "high"])
def test_think_sets_the_variables_of_the_template(think: bool | str) -> None:
    args = parse(think=think).template_args
    assert args["enable_thinking"] is (think is not False)
    assert args.get("reasoning_effort") == ("high" if think == "high" else None)


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("/api/chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
        ("/api/chat", {"messages": "x"}, "messages"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        ("/api/generate", {"prompt": "x", "template": "y"}, "template is not supported"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context is not supported"),
        ("/api/chat", {"model": "other", "messages": [USER]}, "model 'other' not found"),
        ("/api/show", {"model": "other"}, "model 'other' not found"),
        ("/api/embed", {"input": "x"}, "no embedding model"),
    ],
)
def test_errors_have_the_form_of_ollama(path: str, fields: dict[str, Any], text: str) -> None:
    worker = make_worker()
    answer = worker.post(path, fields)
    assert answer.status == (404 if "not found" in text else 400)
    assert list(answer.json) == ["error"] and text in answer.json["error"]
    assert worker.engine.submissions == []


def test_unsupported_fields_that_are_empty_are_accepted() -> None:
    body = {"prompt": "x", "suffix": "", "template": "", "context": [], "images": [], "system": ""}
    assert parse_generate(json.dumps(body).encode()).messages == [{"role": "user", "content": "x"}]


WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER_SCHEMA}}
CALLED = [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]
# Requests as clients send them: /api/chat with a tool and its result.
RECORDED: dict[str, dict[str, Any]] = {
    "ollama 0.6.3": {
        "stream": False, "options": {"num_ctx": 2048, "temperature": 0.1, "stop": ["x"]}, "keep_alive": "5m",
        "messages": [
            USER, {"role": "assistant", "tool_calls": CALLED},
            {"role": "tool", "content": "sunny", "tool_name": "weather"},
        ],
        "tools": [WEATHER], "think": "low",
    },
    "litellm 1.106.2": {  # without a content-type
        "messages": [
            {**USER, "images": []}, {"role": "assistant", "content": "", "images": [], "tool_calls": CALLED},
            {"role": "tool", "content": "sunny", "images": [], "tool_call_id": "call_x"},
        ],
        "options": {"temperature": 0, "num_predict": 5, "repeat_penalty": 0}, "stream": False,
        "tools": [WEATHER], "think": True,
    },
    "langchain-ollama 1.1.0": {
        "stream": True, "options": {"num_predict": 400, "temperature": 0.0},
        "messages": [USER, {"role": "assistant", "tool_calls": CALLED}, {"role": "tool", "content": "sunny"}],
        "tools": [WEATHER], "think": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("client", RECORDED)
def test_recorded_requests_are_answered(client: str) -> None:
    worker = make_worker(CALL)
    content_type = "" if client.startswith("litellm") else "application/json"
    request = RECORDED[client]
    body = json.dumps({"model": "m", **request}).encode()
    answer = worker.post("/api/chat", body, content_type=content_type)
    assert answer.status == 200
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[-1]["done"] is True and (len(lines) > 1) is request["stream"]
    limit = request["options"].get("num_predict")
    assert worker.engine.submissions[0].params.max_tokens == limit
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert len(calls) == (0 if limit == 5 else 1)  # five tokens cut the call off


# -- models ---------------------------------------------------------------------------------------------------------


def test_names_have_the_tag_latest_unless_they_have_another() -> None:
    assert models.add_tag("smollm2") == "smollm2:latest"
    assert models.add_tag("hf:org/name") == "hf:org/name:latest"
    assert models.add_tag("hf:org/name:Q4_K_M") == "hf:org/name:Q4_K_M"
    worker = make_worker()
    assert worker.post("/v1/chat/completions", {"model": "m:latest", "messages": [USER]}).status == 200


def test_parameter_counts_are_written_as_in_model_names() -> None:
    assert [models.format_parameter_count(n) for n in (0, 134_515_008, 7_600_000_000)] == ["", "134.5M", "7.6B"]


def test_content_type_matters_only_for_web_pages() -> None:
    body = json.dumps({"model": "m", "messages": [USER], "stream": False}).encode()
    form = "application/x-www-form-urlencoded"  # what curl -d sends
    assert make_worker().post("/api/chat", body, content_type=form).status == 200
    assert make_worker().post("/api/chat", body, content_type=form, origin="http://a.example").status == 415
    assert make_worker().post("/v1/chat/completions", body, content_type=form).status == 415


def test_embed_cuts_long_texts_unless_told_otherwise() -> None:
    assert embed.parse_embed(b'{"input":"a"}').truncates
    assert not embed.parse_embed(b'{"input":["a"],"truncate":false}').truncates
    with pytest.raises(InvalidRequest, match="input is required"):
        embed.parse_embed(b"{}")
