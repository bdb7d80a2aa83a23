"""The grammars of the grammar benchmark: ordinary ones, each with a text that matches it, and hostile ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from emberline.core.params import GrammarKind, GrammarSpec


@dataclass(frozen=True, slots=True)
class GrammarCase:
    name: str
    grammar: GrammarSpec
    sample: str  # a text that the grammar accepts; masks are measured on its tokens


def _json_schema_case(name: str, schema: dict[str, Any], sample: Any) -> GrammarCase:
    return GrammarCase(name, GrammarSpec("json_schema", json.dumps(schema)), json.dumps(sample, ensure_ascii=False))


def _object_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT = {"type": "string"}
_INT = {"type": "integer"}
_ADDRESS = _object_schema(street=_TEXT, city=_TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
_TREE = {
    "$defs": {"node": _object_schema(value=_INT, children={"type": "array", "items": {"$ref": "#/$defs/node"}})},
    "$ref": "#/$defs/node",
}
_TREE_SAMPLE = {
    "value": 1,
    "children": [{"value": 2, "children": [{"value": 3, "children": []}]}, {"value": 4, "children": []}],
}
_COUNTRIES = [f"country number {i}" for i in range(200)]
_SHAPES = [
    _object_schema(kind={"const": "circle"}, radius={"type": "number"}),
    _object_schema(kind={"const": "box"}, sides={"type": "array", "items": _INT}),
]
_ARITHMETIC = (
    'root ::= term (("+" | "-") term)*\nterm ::= factor (("*" | "/") factor)*\nfactor ::= [0-9]+ | "(" root ")"\n'
)
_QUERY = (
    'root ::= "SELECT " name (", " name)* " FROM " name (" WHERE " name " = " value)?\n'
    'name ::= [a-z_]+\nvalue ::= [0-9]+ | "\'" [^\']* "\'"\n'
)
_PROSE = (
    'A long answer, with "quotes", an accent or two (café, naïve), and 中文, so that most tokens lie inside a string.'
)

ORDINARY: tuple[GrammarCase, ...] = (
    GrammarCase("any_object", GrammarSpec("json_object"), json.dumps({"a": [1, 2.5, None, True], "b": {"c": "d"}})),
    _json_schema_case(
        "flat",
        _object_schema(name=_TEXT, age=_INT, member={"type": "boolean"}),
        {"name": "Ada Lovelace", "age": 36, "member": True},
    ),
    _json_schema_case("long_string", _object_schema(answer=_TEXT), {"answer": _PROSE * 3}),
    _json_schema_case(
        "nested",
        _object_schema(person=_object_schema(name=_TEXT, home=_ADDRESS)),
        {"person": {"name": "Jo", "home": {"street": "Elm 3", "city": "Bonn", "zip": "53111"}}},
    ),
    _json_schema_case(
        "enum_small", _object_schema(unit={"enum": ["celsius", "fahrenheit", "kelvin"]}), {"unit": "kelvin"}
    ),
    _json_schema_case("enum_200", _object_schema(country={"enum": _COUNTRIES}), {"country": _COUNTRIES[137]}),
    _json_schema_case("recursive", _TREE, _TREE_SAMPLE),
    _json_schema_case(
        "union",
        {"type": "array", "items": {"anyOf": _SHAPES}},
        [{"kind": "circle", "radius": 1.5}, {"kind": "box", "sides": [1, 2, 3]}],
    ),
    _json_schema_case("array_1000", {"type": "array", "items": _INT, "maxItems": 1000}, list(range(100))),
    _json_schema_case(
        "array_exact",
        {"type": "array", "items": _TEXT, "minItems": 12, "maxItems": 12},
        [f"item {i}" for i in range(12)],
    ),
    _json_schema_case(
        "string_bounds", _object_schema(code={"type": "string", "minLength": 3, "maxLength": 400}), {"code": "x1 " * 60}
    ),
    _json_schema_case(
        "pattern",
        _object_schema(mail={"type": "string", "pattern": r"^[a-z0-9.]+@[a-z0-9]+\.[a-z]{2,6}$"}),
        {"mail": "ada.lovelace@example.org"},
    ),
    _json_schema_case(
        "number_range", _object_schema(p={"type": "integer", "minimum": -17, "maximum": 4200}), {"p": 4199}
    ),
    _json_schema_case("date", _object_schema(on={"type": "string", "format": "date"}), {"on": "2024-02-29"}),
    _json_schema_case(
        "open_map",
        {"type": "object", "additionalProperties": {"type": "number"}},
        {"alpha": 1, "beta": 2.5, "gamma": -3e4},
    ),
    _json_schema_case(
        "optional_30",
        {"type": "object", "properties": {f"field_{i}": _TEXT for i in range(30)}, "additionalProperties": False},
        {"field_3": "a", "field_17": "b", "field_29": "c"},
    ),
    GrammarCase("regex_phone", GrammarSpec("regex", r"\+[0-9]{1,3} [0-9]{3} [0-9]{3,8}"), "+49 228 1234567"),
    GrammarCase(
        "regex_words",
        GrammarSpec("regex", r"([A-Z][a-z]+ ){2,20}[A-Z][a-z]+\."),
        "The Quick Brown Fox Jumps Over The Lazy Dog.",
    ),
    GrammarCase("choice", GrammarSpec("choice", json.dumps(["yes", "no", "I do not know"])), "I do not know"),
    GrammarCase("arithmetic", GrammarSpec("grammar", _ARITHMETIC), "12*(3+4)-56/(7+(8*9))"),
    GrammarCase("query", GrammarSpec("grammar", _QUERY), "SELECT name, age FROM people WHERE city = 'Bonn'"),
)


def _nested_schema(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"integer"}' + "}}" * depth


def _doubling_schema(levels: int, keyword: str) -> str:
    """Return a JSON schema whose definitions each refer to the next definition twice.

    Fully expanded, it has 2 ** `levels` parts.
    """
    defs: dict[str, Any] = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return json.dumps({"$defs": {**defs, f"d{levels}": _object_schema(a=_INT)}, "$ref": "#/$defs/d0"})


def _union_intersection_schema(pairs: int) -> str:
    """Return a JSON schema that requires all of `pairs` unions, each of two alternatives.

    Fully expanded, it has 2 ** `pairs` alternatives.
    """
    union = [{"anyOf": [{"properties": {f"p{i}": {"const": bit}}} for bit in (0, 1)]} for i in range(pairs)]
    return json.dumps({"allOf": union})


_HOSTILE_SCHEMAS: dict[str, str] = {
    "nested_500": _nested_schema(500),
    "nested_20000": _nested_schema(20_000),
    "min_items_1e6": '{"type":"array","items":{"type":"integer"},"minItems":1000000}',
    "max_items_1e9": '{"type":"array","items":{"type":"integer"},"maxItems":1000000000}',
    "max_length_1e9": '{"type":"string","maxLength":1000000000}',
    "ref_to_itself": '{"$ref":"#"}',
    "ref_cycle": '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}',
    "ref_endless": '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}',
    "ref_remote": '{"$ref":"http://127.0.0.1:9/schema"}',
    "doubling_all_of": _doubling_schema(30, "allOf"),
    "doubling_any_of": _doubling_schema(30, "anyOf"),
    "crossed_40": _union_intersection_schema(40),
    "one_megabyte": json.dumps(
        {
            "type": "object",
            "properties": {f"property_{i}": {"type": "string", "maxLength": i + 1} for i in range(20_000)},
        }
    ),
    "enum_60000": json.dumps({"enum": [f"value {i}" for i in range(60_000)]}),
    "any_of_5000": json.dumps({"anyOf": [_object_schema(**{f"k{i}": _TEXT}) for i in range(5000)]}),
    "patterns_intersected": json.dumps(
        {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuv"]}
    ),
    "multiple_of_1000003": '{"type":"integer","multipleOf":1000003}',
    "unsupported_not": '{"not":{"type":"string"}}',
    "unsupported_unique": '{"type":"array","uniqueItems":true}',
    "unsupported_if": '{"type":"object","if":{"required":["a"]},"then":{"required":["b"]}}',
    "unknown_format": '{"type":"string","format":"made-up"}',
    "unknown_type": '{"type":"strin"}',
    "unsatisfiable": '{"type":"string","minLength":5,"maxLength":2}',
    "not_json": '{"type":',
}
_HOSTILE_REGEXES: dict[str, str] = {
    "nested_plus": r"((a+)+)+b",
    "exponential_dfa": r"(.|\n)*a(.|\n){30}",
    "repeat_cubed": r"((a{1,1000}){1,1000}){1,1000}",
    "repeat_million": r"a{1000000}",
    "unicode_5000": r"\p{L}{1,5000}x",
    "deep_parens": "(" * 100_000 + "a" + ")" * 100_000,
    "words_50000": "|".join(f"word{i}" for i in range(50_000)),
    "lookahead": r"(?=a)b",
    "backreference": r"(a)\1",
    "unclosed": r"([a-z",
}
_HOSTILE_GRAMMARS: dict[str, str] = {
    "ambiguous": 'root ::= root root | "a"',
    "only_itself": "root ::= root",
    "undefined": "root ::= nothing",
    "deep_parens": "root ::= " + "(" * 900 + '"a"' + ")" * 900,
    "chain_20000": "root ::= r0\n"
    + "\n".join(f'r{i} ::= "a" r{i + 1} | "b" r{i + 1}' for i in range(20_000))
    + '\nr20000 ::= "z"',
    "repeat_1e9": 'root ::= ("a" | "b"){1000000000}',
    "garbage": "\x00\xff}{!!",
}

_HOSTILE: dict[GrammarKind, dict[str, str]] = {
    "json_schema": _HOSTILE_SCHEMAS,
    "regex": _HOSTILE_REGEXES,
    "grammar": _HOSTILE_GRAMMARS,
}
HOSTILE: tuple[GrammarCase, ...] = tuple(
    GrammarCase(f"{kind}_{name}", GrammarSpec(kind, text), "")
    for kind, table in _HOSTILE.items()
    for name, text in table.items()
)
