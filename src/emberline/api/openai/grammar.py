"""What the output must match, in every way the OpenAI protocols and vLLM's extensions say it. Only one may be used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from emberline.api.fields import Empty, Off
from emberline.api.openai.accepted import AcceptedFields
from emberline.api.parse import Wire, decode_object, encode_text
from emberline.core.errors import InvalidRequest
from emberline.core.params import Grammar

Schema = dict[str, Any] | str  # a JSON schema, or its text
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=4096)]
Pattern = Annotated[str, Meta(min_length=1)]


class TextFormat(Wire, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(Wire, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None  # llama.cpp's; without one, any JSON object


class NamedSchema(Wire):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema: dict[str, Any] | None = None  # without one, any JSON object
    description: str | None = None
    strict: bool | None = None  # the output always matches, strict or not


class JsonSchemaFormat(Wire, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's place for it


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Wire):
    """vLLM's one object for all of them."""

    json: Schema | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    disable_fallback: Off = None
    disable_any_whitespace: Off = None
    disable_additional_properties: Off = None
    whitespace_pattern: Empty = None
    structural_tag: Empty = None


class GrammarFields(AcceptedFields, kw_only=True):
    """The fields by which a request may ask for a grammar."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    # as SGLang and llama.cpp name them; empty: as if left out
    regex: str | None = None
    ebnf: str | None = None
    grammar_text: str | None = field(name="grammar", default=None)
    json_schema: Schema | None = None

    def grammar(self) -> Grammar | None:
        found = {
            "response_format": _of_format(self.response_format),
            "guided_json": _of_schema(self.guided_json, "guided_json"),
            "guided_regex": _of_text("regex", self.guided_regex),
            "guided_choice": _of_choices(self.guided_choice),
            "guided_grammar": _of_text("grammar", self.guided_grammar),
            "regex": _of_text("regex", self.regex or None),
            "ebnf": _of_text("grammar", self.ebnf or None),
            "grammar": _of_text("grammar", self.grammar_text or None),
            "json_schema": _of_schema(self.json_schema or None, "json_schema"),
        }
        if (asked := self.structured_outputs) is not None:
            found |= {
                "structured_outputs.json": _of_schema(asked.json, "structured_outputs.json"),
                "structured_outputs.regex": _of_text("regex", asked.regex),
                "structured_outputs.choice": _of_choices(asked.choice),
                "structured_outputs.grammar": _of_text("grammar", asked.grammar),
                "structured_outputs.json_object": Grammar("json_object") if asked.json_object else None,
            }
        given = {param: grammar for param, grammar in found.items() if grammar is not None}
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} exclude each other", param=list(given)[1])
        return next(iter(given.values()), None)


def _of_format(asked: ResponseFormat | None) -> Grammar | None:
    match asked:
        case JsonSchemaFormat(json_schema=None, schema=None):
            param = "response_format.json_schema"
            raise InvalidRequest(f"{param} is required", param=param)
        case (
            JsonSchemaFormat(json_schema=NamedSchema(schema=dict(schema)))
            | JsonSchemaFormat(schema=dict(schema))
            | JsonObjectFormat(schema=dict(schema))
        ):
            return Grammar("json_schema", encode_text(schema))
        case JsonSchemaFormat() | JsonObjectFormat():
            return Grammar("json_object")
    return None


def _of_schema(schema: Schema | None, param: str) -> Grammar | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        schema = decode_object(schema, param)
    return Grammar("json_schema", encode_text(schema))


def _of_text(kind: Literal["regex", "grammar"], text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)


def _of_choices(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else Grammar("choice", encode_text(choices))
