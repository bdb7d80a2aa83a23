"""Completions, embeddings, models and the tokenizer's endpoints: requests, and replies that are not streamed."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse, Model

from emberline.api import tokenize
from emberline.api.call import ChatCall, Tool
from emberline.api.openai import completions as openai_completions
from emberline.api.openai import embeddings as openai_embeddings
from emberline.api.openai import models as openai_models
from emberline.core.errors import InvalidRequest, ModelNotFound
from emberline.core.params import GrammarSpec

USER = {"role": "user", "content": "hi"}


def complete(**fields: Any) -> openai_completions.OpenAICompletionCall:
    return openai_completions.parse(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def embed(**fields: Any) -> Any:
    return openai_embeddings.parse(json.dumps({"model": "m", "input": "p", **fields}).encode())


def tokens(**fields: Any) -> tokenize.TokenizeCall:
    return tokenize.parse(json.dumps(fields).encode())


INPUTS = [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]


@pytest.mark.parametrize(("wire", "expected"), INPUTS)
def test_inputs(wire: Any, expected: Any) -> None:
    assert complete(prompt=wire).prompts == expected
    if isinstance(expected[0], str):
        assert embed(input=wire).inputs == expected


BAD_INPUTS: list[tuple[Any, str]] = [
    (None, ""),
    (5, ""),
    ({}, ""),
    ([], ""),
    ([[]], "[0]"),
    ([-1], "[0]"),
    ([1 << 31], "[0]"),
    ([[1], ["a"]], "[1][0]"),
    (["a", 1], ""),
    (["a", [1]], ""),
    ([1, [1]], ""),
    (["a"] * 2049, ""),
]


@pytest.mark.parametrize(("wire", "where"), BAD_INPUTS)
def test_invalid_inputs(wire: Any, where: str) -> None:
    for parse, name in ((complete, "prompt"), (embed, "input")):
        with pytest.raises(InvalidRequest) as caught:
            parse(**{name: wire})
        assert caught.value.param == name + where


def test_completion_defaults() -> None:
    call = complete()
    assert call.params.max_tokens == 16
    assert (call.echo, call.add_special_tokens, call.params.prompt_logprobs) == (False, True, None)
    optional = dict.fromkeys(openai_completions.CompletionRequest.__struct_fields__)
    assert complete(**{**optional, "model": "m", "prompt": "p"}) == call


def test_completion_fields() -> None:
    assert complete(best_of=2, n=2).params.n == 2
    assert not complete(add_special_tokens=False).add_special_tokens
    assert complete(guided_regex="a").params.grammar == GrammarSpec("regex", "a")
    assert complete(logprobs=3).params.logprobs == 3
    assert complete(stream=True, stream_options={"include_usage": True}).includes_usage


def test_echo_with_logprobs_needs_prompt_logprobs() -> None:
    assert complete(echo=True).params.prompt_logprobs is None
    assert complete(echo=True, logprobs=2).params.prompt_logprobs == 2
    assert complete(echo=True, logprobs=2, prompt_logprobs=5).params.prompt_logprobs == 5
    assert complete(logprobs=2).params.prompt_logprobs is None


def test_max_tokens_zero_needs_echo() -> None:
    call = complete(echo=True, logprobs=1, max_tokens=0)
    assert call.echoes_only
    assert call.params.max_tokens == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["a"] * 2000, "n": 2}, "prompt"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_completion_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(**fields)
    assert caught.value.param == param


def test_every_completion_field_of_official_client_is_known() -> None:
    from openai.types.completion_create_params import CompletionCreateParamsBase

    assert set(CompletionCreateParamsBase.__annotations__) <= set(
        openai_completions.CompletionRequest.__struct_fields__
    )


VECTORS = [[0.5, -0.25], [1.0, 0.0]]


def test_embeddings() -> None:
    call = embed(input=["a", "b"], dimensions=2, user="u")
    assert (call.dimensions, call.common.user, call.encoding) == (2, "u", "float")
    reply = openai_embeddings.render(call, VECTORS, 7, "m")
    typed = CreateEmbeddingResponse.model_validate(reply)
    assert [entry.embedding for entry in typed.data] == VECTORS
    assert (typed.usage.prompt_tokens, typed.usage.total_tokens) == (7, 7)


def test_embeddings_as_base64() -> None:
    reply = openai_embeddings.render(embed(input=["a", "b"], encoding_format="base64"), VECTORS, 7, "m")
    got = [struct.unpack("<2f", base64.b64decode(entry["embedding"])) for entry in reply["data"]]
    assert got == [tuple(vector) for vector in VECTORS]


def test_embedding_model_is_optional() -> None:
    call = openai_embeddings.parse(b'{"input": "p"}')
    assert call.common.model == ""
    assert openai_embeddings.render(call, VECTORS[:1], 1, "e")["model"] == "e"


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]]])
def test_token_ids_are_not_embedded(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="input has token ids") as caught:
        embed(input=ids)
    assert caught.value.param == "input" and "send texts" in str(caught.value)


def test_chat_models_are_listed_before_embedders() -> None:
    kinds = {"a-embedder": "embedding", "b": "chat", "c": "chat"}
    served = [openai_models.ServedModel(name, 1, 2, kind=kind) for name, kind in kinds.items()]
    listed = openai_models.list_models(served)
    assert [entry["id"] for entry in listed["data"]] == ["b", "c", "a-embedder"]
    assert (listed["first_id"], listed["last_id"]) == ("b", "a-embedder")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"dimensions": 0}, "dimensions"), ({"encoding_format": "hex"}, "encoding_format")],
)
def test_embedding_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        embed(**fields)
    assert caught.value.param == param


SERVED = [openai_models.ServedModel("m", 1700000000, 8192), openai_models.ServedModel("e", 1700000001, 256)]


def test_model_list_has_fields_of_both_protocols() -> None:
    from anthropic.types import ModelInfo

    reply = openai_models.list_models(SERVED)
    assert [Model.model_validate(entry).id for entry in reply["data"]] == ["m", "e"]
    assert [ModelInfo.model_construct(**entry).display_name for entry in reply["data"]] == ["m", "e"]
    assert (reply["first_id"], reply["last_id"], reply["has_more"]) == ("m", "e", False)
    assert reply["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert openai_models.retrieve_model(SERVED, "e") == reply["data"][1]
    assert (reply["data"][0]["root"], reply["data"][0]["parent"]) == ("m", None)
    assert openai_models.list_models([])["data"] == []


def test_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        openai_models.retrieve_model(SERVED, "../etc/passwd")


def test_tokenize_text() -> None:
    call = tokens(model="m", prompt="hi", return_token_strs=True)
    assert (call.model, call.prompt, call.add_special_tokens) == ("m", "hi", True)
    assert tokenize.render(call, [1, 2], ["h", "i"], 99) == {
        "count": 2,
        "max_model_len": 99,
        "tokens": [1, 2],
        "token_strs": ["h", "i"],
    }
    assert tokenize.render(tokens(prompt=""), [], [], 99)["token_strs"] is None
    assert not tokens(prompt="", add_special_tokens=False).add_special_tokens


def test_tokenize_fields_of_llama_cpp() -> None:
    call = tokens(content="hi", parse_special=True)
    assert (call.prompt, call.add_special_tokens) == ("hi", False)
    assert tokenize.render(call, [1, 2], [], 99)["tokens"] == [1, 2]
    assert tokens(content="hi", add_special=True).add_special_tokens
    pieces = tokenize.render(tokens(content="hi", with_pieces=True), [1, 2], ["h", "i"], 99)
    assert pieces["tokens"] == [{"id": 1, "piece": "h"}, {"id": 2, "piece": "i"}]


def test_tokenize_messages() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = tokens(messages=[USER], tools=[tool], add_generation_prompt=False, chat_template_kwargs={"x": 1})
    assert isinstance(call.prompt, ChatCall)
    assert (call.prompt.messages, call.prompt.tools, call.prompt.template_args) == ([USER], (Tool("f"),), {"x": 1})
    assert not call.prompt.adds_generation_prompt
    assert not call.prompt.add_special_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template"),
        ({"prompt": "a", "content": "a"}, "prompt"),
        ({"content": "a", "tools": []}, "tools"),
        ({"prompt": "a", "with_pieces": True}, "with_pieces"),
        ({"content": "a", "parse_special": False}, "parse_special"),
    ],
)
def test_tokenize_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokens(**fields)
    assert caught.value.param == param


def test_detokenize() -> None:
    call = tokenize.parse_detokenize(b'{"tokens":[1,2],"model":"m"}')
    assert (call.model, call.ids) == ("m", [1, 2])
    assert tokenize.render_detokenized(call, "hi") == {"prompt": "hi"}
    nameless = tokenize.parse_detokenize(b'{"tokens":[1,2]}')
    assert tokenize.render_detokenized(nameless, "hi") == {"prompt": "hi", "content": "hi"}
    with pytest.raises(InvalidRequest) as caught:
        tokenize.parse_detokenize(b'{"tokens":[1,"a"]}')
    assert caught.value.param == "tokens[1]"


def test_model_entry_has_its_kind() -> None:
    served = [openai_models.ServedModel("m", 0, 9), openai_models.ServedModel("e", 0, 9, kind="embedding")]
    assert [row["kind"] for row in openai_models.list_models(served)["data"]] == ["chat", "embedding"]
