"""Request fields of OpenAI, vLLM, SGLang and llama.cpp that constrain the output to a grammar.

A request may set only one of them, or several to the same grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from emberline.api.fields import OnlyEmpty, OnlyFalse
from emberline.api.openai.accepted import AcceptedFields
from emberline.api.parse import WireStruct, decode_json_object, encode_json_text
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec

Schema = dict[str, Any] | str  # a JSON schema as an object or as text
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=4096)]
Pattern = Annotated[str, Meta(min_length=1)]


class TextFormat(WireStruct, tag_field="type", tag="text"):
    """The response format for unconstrained text."""


class JsonObjectFormat(WireStruct, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None  # llama.cpp's field; None: any JSON object


class NamedSchema(WireStruct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema: dict[str, Any] | None = None  # None: any JSON object
    description: str | None = None
    strict: bool | None = None  # no effect: the output always matches the schema


class JsonSchemaFormat(WireStruct, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's field


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(WireStruct):
    """vLLM's `structured_outputs`, which holds any kind of constraint on the output."""

    json: Schema | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    disable_fallback: OnlyFalse = None
    disable_any_whitespace: OnlyFalse = None
    disable_additional_properties: OnlyFalse = None
    whitespace_pattern: OnlyEmpty = None
    structural_tag: OnlyEmpty = None


class GrammarFields(AcceptedFields, kw_only=True):
    """The fields by which a request may ask for a grammar."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    # names of SGLang and llama.cpp; an empty text has no effect
    regex: str | None = None
    ebnf: str | None = None
    grammar_text: str | None = field(name="grammar", default=None)
    json_schema: Schema | None = None

    def grammar(self) -> GrammarSpec | None:
        """Return the requested grammar, or None. Raises InvalidRequest if fields request different grammars."""
        found = {
            "response_format": _grammar_from_response_format(self.response_format),
            "guided_json": _grammar_from_schema(self.guided_json, "guided_json"),
            "guided_regex": _grammar_from_text("regex", self.guided_regex),
            "guided_choice": _grammar_from_choices(self.guided_choice),
            "guided_grammar": _grammar_from_text("grammar", self.guided_grammar),
            "regex": _grammar_from_text("regex", self.regex or None),
            "ebnf": _grammar_from_text("grammar", self.ebnf or None),
            "grammar": _grammar_from_text("grammar", self.grammar_text or None),
            "json_schema": _grammar_from_schema(self.json_schema or None, "json_schema"),
        }
        if (outputs := self.structured_outputs) is not None:
            found |= {
                "structured_outputs.json": _grammar_from_schema(outputs.json, "structured_outputs.json"),
                "structured_outputs.regex": _grammar_from_text("regex", outputs.regex),
                "structured_outputs.choice": _grammar_from_choices(outputs.choice),
                "structured_outputs.grammar": _grammar_from_text("grammar", outputs.grammar),
                "structured_outputs.json_object": GrammarSpec("json_object") if outputs.json_object else None,
            }
        given = {param: grammar for param, grammar in found.items() if grammar is not None}
        if len(set(given.values())) > 1:  # guidance sends the same grammar by the old and the new field
            raise InvalidRequest(
                f"{' and '.join(given)} are set, but only one of them may be",
                param=list(given)[1],
                hint="send one of them",
            )
        return next(iter(given.values()), None)


def _grammar_from_response_format(response_format: ResponseFormat | None) -> GrammarSpec | None:
    match response_format:
        case JsonSchemaFormat(json_schema=None, schema=None):
            param = "response_format.json_schema"
            hint = 'send {"schema": {...}} in it'
            raise InvalidRequest(f"{param} is required with type json_schema", param=param, hint=hint)
        case (
            JsonSchemaFormat(json_schema=NamedSchema(schema=dict(schema)))
            | JsonSchemaFormat(schema=dict(schema))
            | JsonObjectFormat(schema=dict(schema))
        ):
            return GrammarSpec("json_schema", encode_json_text(schema))
        case JsonSchemaFormat() | JsonObjectFormat():
            return GrammarSpec("json_object")
    return None


def _grammar_from_schema(schema: Schema | None, param: str) -> GrammarSpec | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        schema = decode_json_object(schema, param)
    return GrammarSpec("json_schema", encode_json_text(schema))


def _grammar_from_text(kind: Literal["regex", "grammar"], text: str | None) -> GrammarSpec | None:
    return None if text is None else GrammarSpec(kind, text)


def _grammar_from_choices(choices: list[str] | None) -> GrammarSpec | None:
    return None if choices is None else GrammarSpec("choice", encode_json_text(choices))
