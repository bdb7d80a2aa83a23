"""Every error and every warning names its object and, where it can help, says what to do.

`scripts/list_messages` lists the messages that are in the code. Here rules check the list, and wrong inputs show what a
user of the API, the command line, the router and the gateway reads.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from local_gateway import LocalGateway
from scripted_engine import WorkerHarness

from emberline.cli.__main__ import main
from emberline.core.errors import EmberlineError
from emberline.router.policy import RoutingRules, choose_worker
from emberline.router.request_summary import RequestSummary
from emberline.router.token_estimator import TokenEstimator

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


# -- the list ----------------------------------------------------------------------------------------------------------

# Whether an error needs a hint. "unless rule": not if the message itself says what is allowed. All other classes are
# failures of servers or of the engine, which the reader of the message cannot correct.
NEEDS_HINT = {
    "InvalidRequest": "unless rule",
    "cli": "unless rule",
    "LimitExceeded": "always",
    "Overloaded": "always",
    "BodyTooLarge": "always",
    "WorkTooLarge": "always",
    "UnsupportedMediaType": "always",
    "ContextLengthExceeded": "always",
    "Unauthorized": "always",
    "WrongClusterKey": "always",
    "Forbidden": "always",
    "ClusterCallForbidden": "always",
    "HostNotAllowed": "always",
    "OriginNotAllowed": "always",
    "NotFound": "always",
    "ModelNotFound": "always",
    "ProviderNotFound": "always",
    "GatewayNotFound": "always",
    "ProviderKeyMissing": "always",
    "Conflict": "always",
    "ModelError": "always",
    "ModelFileError": "always",
    "ModelNotPulled": "always",
    "UnsupportedModel": "always",
    "DownloadError": "always",
}
STATES_RULE = re.compile(
    r"\bmust\b|at most|at least|required|\bone of\b|of the form|form KIND|not valid|cannot be parsed|: \{\w+\}$"
)
# Files whose errors answer other parts of Emberline, not a user: a hint would have no reader.
WITHOUT_USER = {
    "core/handoff.py": "the router sends handoffs",
    "worker/resumed_output.py": "the router sends handoffs",
    "worker/cluster_handler.py": "the router forwards requests",
    "worker/generator.py": "the router asks for separate prefills",
    "engine/request_builder.py": "the router sets resumed and publish",
    "cluster/fake_completion.py": "a fake worker for tests",
    "net/connection_pool.py": "the caller is code of the router or gateway",
}
# Messages without a value, a quoted name or a param must name one of these objects.
OBJECTS = re.compile(
    r"stream|event|reply|body|prompt|choice|tool call|chat template|server|engine|worker|process|LLM object|model"
    r"|key\b|API|/metrics|Redis|PostgreSQL|provider|GGUF|handoff|Origin header|text|time limit|token|sign-in link"
)
# Texts of other servers that clients compare.
FOREIGN_TEXTS = {"worker/stored_responses.py": "OpenAI's own messages"}
PROPER_NAMES = re.compile(r"(Gemini|Bedrock|Cohere|Google|Replicate|Redis|PostgreSQL|Cloudflare|Anthropic|OpenAI)\b")
PRONOUN = re.compile(r"(it|its|they|them|these|those|this (is|was|has|must|cannot|does|needs))\b", re.IGNORECASE)
KEY_VALUE_LINE = re.compile(r"[A-Z][^:=]*: (\w+=[^=]+ )*\w+=\S")


@pytest.fixture(scope="module")
def messages() -> list[Any]:
    listed: list[Any] = load_script("list_messages").all_messages()
    assert len(listed) > 500, "most messages were not found"
    return listed


@pytest.fixture(scope="module")
def errors(messages: list[Any]) -> list[Any]:
    levels = load_script("list_messages").LOG_LEVELS
    return [each for each in messages if each.kind not in levels and each.path not in FOREIGN_TEXTS]


@pytest.fixture(scope="module")
def log_lines(messages: list[Any]) -> list[Any]:
    levels = load_script("list_messages").LOG_LEVELS
    return [each for each in messages if each.kind in levels]


def show(found: list[Any]) -> str:
    return "\n".join(map(str, found))


def test_errors_name_a_value_a_field_or_an_object(errors: list[Any]) -> None:
    named = re.compile(r"\{|['`\"]|--\w|\w[._]\w")
    wrong = [each for each in errors if not (named.search(each.text) or each.has_param or OBJECTS.search(each.text))]
    assert not wrong, show(wrong)


def test_errors_begin_and_end_alike(errors: list[Any]) -> None:
    """A message is not a sentence: it follows "emberline: " or stands before "(hint: ...)"."""
    wrong = [each for each in errors if each.text.endswith((".", "!", " ", ":"))]
    wrong += [each for each in errors if re.match("[A-Z][a-z]", each.text) and not PROPER_NAMES.match(each.text)]
    assert not wrong, show(wrong)


def test_messages_do_not_begin_with_a_pronoun(messages: list[Any]) -> None:
    wrong = [each for each in messages if PRONOUN.match(each.text)]
    assert not wrong, show(wrong)


def test_messages_have_no_banned_words(messages: list[Any]) -> None:
    banned = load_script("check_wording").BANNED_WORDS
    wrong = [each for each in messages if banned.search(each.text)]
    assert not wrong, show(wrong)


def test_errors_that_a_user_can_correct_have_a_hint(errors: list[Any]) -> None:
    wrong = []
    for each in errors:
        rule = NEEDS_HINT.get(each.kind, "never")
        is_needed = rule == "always" or (rule == "unless rule" and not STATES_RULE.search(each.text))
        if is_needed and not each.has_hint and each.path not in WITHOUT_USER:
            wrong.append(each)
    assert not wrong, show(wrong)


def test_exceptions_are_still_needed(messages: list[Any]) -> None:
    paths = {each.path for each in messages}
    assert not {*WITHOUT_USER, *FOREIGN_TEXTS} - paths
    known = {each.kind for each in messages}
    assert not NEEDS_HINT.keys() - known


def test_log_lines_have_an_event_and_facts(log_lines: list[Any]) -> None:
    """A log line is "Event: key=value key=value"; without facts it is the event alone."""
    wrong = [each for each in log_lines if not each.text[:1].isupper()]
    wrong += [each for each in log_lines if "%" in each.text and not KEY_VALUE_LINE.match(each.text)]
    assert not wrong, show(wrong)


# -- what users read ---------------------------------------------------------------------------------------------------


def check_message(message: str, named: str, hint: str) -> None:
    """Check that a message names the object, and that its hint, if there is one, names the remedy."""
    assert named in message, message
    if hint:
        assert re.search(r"\(hint: .*" + re.escape(hint), message), message


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}


@pytest.fixture(scope="module")
def worker() -> WorkerHarness:
    return WorkerHarness(lambda text, index: "done")


@pytest.mark.parametrize(
    ("path", "body", "named", "hint"),
    [
        ("/v1/chat/completions", b"{", "not valid JSON", ""),
        ("/v1/chat/completions", b"[]", "request body", ""),
        ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, "temperature", ""),
        ("/v1/chat/completions", {**CHAT, "temperature": 9}, "temperature", ""),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, "'other'", "'m'"),
        ("/v1/chat/completions", {"model": "m"}, "messages", ""),
        ("/v1/chat/completions", {**CHAT, "stream_options": {}}, "stream_options", "stream"),
        ("/v1/completions", {**COMPLETION, "max_tokens": 0}, "max_tokens", ""),
        ("/v1/completions", {**COMPLETION, "prompt": "x" * 5000}, "4000", "prompt"),
        ("/v1/messages", {"model": "m", "messages": CHAT["messages"]}, "max_tokens", ""),
        ("/v1/responses", {"model": "m"}, "input", ""),
        ("/v1/embeddings", {"model": "m", "input": "x"}, "embedding model", "--embed"),
    ],
)
def test_api_errors(worker: WorkerHarness, path: str, body: Any, named: str, hint: str) -> None:
    answer = worker.post(path, body)
    assert 400 <= answer.status < 500
    check_message(answer.json["error"]["message"], named, hint)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def command_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        assert main([*arguments]) != 0
    except SystemExit as e:
        assert e.code != 0
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named", "hint"),
    [
        (["gateway", "--config", "/no/such.toml"], "/no/such.toml", ""),
        (["gateway", "--prot=1"], "--prot", ""),
        (["gateway", "--port", "many"], "--port", ""),
        (["gateway", "--host", "0.0.0.0", "--port", "0"], "0.0.0.0", "EMBERLINE_ADMIN_KEY"),
        (["drain", "w", "--router", "http://127.0.0.1:1"], "http://127.0.0.1:1", "router"),
        (["pull", "/no/such/model"], "/no/such/model", ""),
    ],
)
def test_command_line_errors(
    arguments: list[str], named: str, hint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ["--store", f"sqlite:{tmp_path}"] if arguments[0] == "gateway" else []
    check_message(command_error(capsys, *arguments, *more), named, hint)


def test_port_in_use(taken_port: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["gateway", "--port", str(taken_port), "--store", f"sqlite:{tmp_path}"]
    check_message(command_error(capsys, *arguments), str(taken_port), "--port")


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("unknown_setting", 1, "unknown_setting"),
        ("flush", 1000.0, "flush"),
        ("max_body", "big", "max_body"),
        ("gateways", {"default": {"default_provider": "no-such-provider"}}, "no-such-provider"),
        ("gateways", {"default": {"cache_ttl": -1}}, "cache_ttl"),
    ],
)
def test_settings_file_errors(
    name: str, value: Any, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [f"{name} = {json.dumps(value)}"]
    if isinstance(value, dict):
        lines = ["[gateways.default]", *(f"{key} = {json.dumps(inner)}" for key, inner in value["default"].items())]
    config = tmp_path / "gateway.toml"
    config.write_text("\n".join(lines))
    arguments = ("gateway", "--port", "0", "--config", str(config), "--store", f"sqlite:{tmp_path}")
    check_message(command_error(capsys, *arguments), named, "")


@pytest.mark.parametrize(
    ("body", "named", "hint"),
    [(b"{", "JSON", ""), (b'{"model": 1}', "model", ""), (b'{"model": "m"}', "no worker", "emberline worker")],
)
def test_router_errors(body: bytes, named: str, hint: str) -> None:
    with pytest.raises(EmberlineError) as raised:
        choose_worker(RequestSummary.parse(body), [], {}, TokenEstimator(), RoutingRules(), 0.0)
    check_message(str(raised.value), named, hint)


KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    providers = {"custom-gone": {"base_url": "http://127.0.0.1:1/v1"}}
    with LocalGateway(tmp_path_factory.mktemp("gateway"), (), lambda urls: providers, authentication=True) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "key", "named", "hint"),
    [
        ("/v1/chat/completions", b"{", KEY, "JSON", "object"),
        ("/v1/chat/completions", {"messages": []}, KEY, "model", "/v1/models"),
        ("/v1/chat/completions", CHAT, "", "key", "Bearer KEY"),
        ("/v1/chat/completions", CHAT, "evk_wrong", "key", "/keys"),
        ("/v1/default/nowhere/compat/chat/completions", CHAT, KEY, "'nowhere'", ""),
        ("/v1/default/default/compat/chat/completions", CHAT, KEY, "'m'", "openai"),
        ("/v1/chat/completions", {**CHAT, "model": "custom-gone/m"}, KEY, "127.0.0.1:1", ""),
        ("/v1/chat/completions", {**CHAT, "model": "openai/m"}, KEY, "openai", "key"),
        ("/v1/chat/completions", {**CHAT, "model": "dynamic/none"}, KEY, "'none'", "routes"),
        ("/v1/chat/completions", {**CHAT, "model": "pool/none"}, KEY, "'none'", "pools"),
        ("/v2/chat", CHAT, KEY, "/v2/chat", "/v1/chat/completions"),
        ("/admin/accounts/default/keys/none?limit=x", None, KEY, "limit", ""),
        ("/admin/accounts/default/keys?limit=x", None, KEY, "limit", ""),
        ("/admin/accounts/default/gateways/none", None, KEY, "'none'", "list"),
        ("/admin/nothing", None, KEY, "/admin/nothing", "openapi"),
    ],
)
def test_gateway_errors(gateway: LocalGateway, path: str, body: Any, key: str, named: str, hint: str) -> None:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(gateway.url + path, data, headers), timeout=30)
    check_message(json.loads(raised.value.read())["error"]["message"], named, hint)
