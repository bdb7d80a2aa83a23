"""GrammarCompiler and GrammarMatcher on a vocabulary of bytes: accepted and rejected texts, and errors of each kind."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bytelevel import EOS, SPECIAL, VOCAB_SIZE, encode, tokenizer_file

from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.engine.grammar import MAX_CACHED_GRAMMARS, MAX_GRAMMAR_CHARS, GrammarCompiler, GrammarMatcher

PADDED = VOCAB_SIZE + 77  # models pad their vocabulary


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_file(tmp_path_factory.mktemp("tokenizer")), PADDED, [EOS])


def walk(matcher: GrammarMatcher, text: str) -> int:
    """Return how many tokens of the text the masks allow."""
    ids = encode(text)
    for n, token in enumerate(ids):
        if token not in matcher.allowed_tokens():
            return n
        assert matcher.accept(token)
    return len(ids)


def accepts(compiler: GrammarCompiler, grammar: GrammarSpec, text: str) -> bool:
    matcher = compiler.compile(grammar)
    return walk(matcher, text) == len(encode(text)) and EOS in matcher.allowed_tokens()


def schema(**keywords: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(keywords))


PERSON = schema(
    type="object",
    properties={"name": {"$ref": "#/$defs/short"}, "age": {"type": "integer", "minimum": 0}},
    required=["name", "age"],
    additionalProperties=False,
    **{"$defs": {"short": {"type": "string", "maxLength": 5}}},
)
OPEN = schema(type="object", properties={"a": {"type": "integer"}}, required=["a"])
JOINED = GrammarSpec(
    "grammar",
    json.dumps({"grammars": [{"lark_grammar": 'start: "x" @b'}, {"name": "b", "lark_grammar": "root ::= [0-9]"}]}),
)
TREE = schema(type="object", properties={"kids": {"type": "array", "items": {"$ref": "#"}}}, additionalProperties=False)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            GrammarSpec("json_object"),
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "é": "中"\n}'],
            ["[]", "1", "{", ' {"a":1}'],
        ),
        (PERSON, ['{"name": "Ada", "age": 3}'], ['{"name": "Ada"}', '{"name": "Adalbert", "age": 3}']),
        (PERSON, [], ['{"name":"A","age":-1}', '{"name": 1, "age": 1}']),
        (PERSON, ['{"name":"","age":0}'], ['{"name": "Ada", "age": 3, "x": 1}', '{"age": 3, "name": "Ada"}']),
        (OPEN, ['{"a": 1}', '{"a": 1, "b": "more"}'], ['{"b": 1}']),
        (TREE, ['{"kids": [{"kids": []}, {}]}'], ['{"kids": [1]}']),
        (schema(enum=["a", 1, None]), ['"a"', "1", "null"], ['"b"', "2"]),
        (schema(anyOf=[{"type": "boolean"}, {"type": "string", "format": "date"}]), ["true", '"2024-02-29"'], ['"x"']),
        (GrammarSpec("regex", r"\+[0-9]{1,3} [a-f/]+"), ["+49 a/f"], ["49 a", "+49 ", "+4900 a"]),
        (GrammarSpec("regex", r"^(yes|no)$"), ["yes", "no"], ["yesno", "y"]),
        (GrammarSpec("choice", '["a\\"b", "é\\n", "ab"]'), ['a"b', "é\n", "ab"], ["a", "b"]),
        (GrammarSpec("grammar", 'start: "(" start ")" | /[0-9]+/'), ["7", "((42))"], ["(7", "()"]),
        (GrammarSpec("grammar", 'root ::= "(" root ")" | [0-9]+'), ["7", "((42))"], ["(7", "()"]),
        (JOINED, ["x1"], ["1"]),
    ],
)  # fmt: skip
def test_each_kind_accepts_and_rejects_texts(
    compiler: GrammarCompiler, grammar: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(compiler, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, grammar, text)] == []


ASCII_CASES = [
    (r"\d-\d", "3-4", "\u0663-\u0664"),
    (r"[\d_]{2}", "3_", "\U0001fbf8_"),
    (r"\w+", "aZ_9", "é"),
    (r"[\w-.]+", "a-.", "é"),
    (r"a\sb", "a\tb", "a\u00a0b"),
    (r"\\d", "\\d", "\\3"),
    (r"\D\W\S", "é\u0663\u00a0", "3é3"),
    (r"[^\d]", "\u0663", "3"),
    (r"[\s\S]", "\u00a0", ""),
    (r"[\w--\d]", "a", "3"),
    (r"[[:digit:]]", "3", "\u0663"),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), ASCII_CASES)
def test_classes_are_ascii_in_every_kind_of_grammar(
    compiler: GrammarCompiler, pattern: str, good: str, bad: str
) -> None:
    regex = GrammarSpec("regex", pattern)
    lark = f'start: "/\\"" A // a /comment \nA: /{pattern}/'
    composed = {"grammars": [{"lark_grammar": "start: @a"}, {"name": "a", "lark_grammar": lark}]}
    assert accepts(compiler, regex, good) and not accepts(compiler, regex, bad)
    for grammar in (lark, json.dumps(composed)):
        assert accepts(compiler, GrammarSpec("grammar", grammar), '/"' + good)
        assert not accepts(compiler, GrammarSpec("grammar", grammar), '/"' + bad)


@pytest.mark.parametrize(
    "inner",
    [
        {"type": "string", "pattern": r"^\w\d$"},
        {"type": "string", "pattern": r"^[\w_][\d.]$"},
        {"anyOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": {"type": "string", "pattern": r"^\w\d$"}}},
    ],
)
def test_classes_are_ascii_in_json_schemas(compiler: GrammarCompiler, inner: dict[str, object]) -> None:
    directive = GrammarSpec("grammar", f"start: %json {json.dumps(inner)}")
    for grammar in (GrammarSpec("json_schema", json.dumps(inner)), directive):
        assert accepts(compiler, grammar, '"a3"')
        for text in ("é3", "a\u0663"):
            assert not accepts(compiler, grammar, f'"{text}"'), text


def test_classes_are_ascii_in_names_of_properties(compiler: GrammarCompiler) -> None:
    grammar = schema(type="object", patternProperties={r"^\d\w$": {"type": "null"}}, additionalProperties=False)
    assert accepts(compiler, grammar, '{"3a": null}') and not accepts(compiler, grammar, '{"\u0663a": null}')


def test_grammar_is_complete_when_no_token_may_follow(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(OPEN)
    walk(matcher, '{"a": 1')
    assert not matcher.is_complete and EOS not in matcher.allowed_tokens()
    walk(matcher, "}")
    assert matcher.is_complete and matcher.allowed_tokens() == [EOS]
    number = compiler.compile(GrammarSpec("regex", "[0-9]+"))
    walk(number, "12")
    assert EOS in number.allowed_tokens() and not number.is_complete
    assert number.accept(EOS) and number.is_complete and number.error is None


def test_masks_cover_the_vocabulary_and_exclude_padding(compiler: GrammarCompiler) -> None:
    assert compiler.mask_words == (PADDED + 31) // 32
    anything = compiler.compile(GrammarSpec("regex", r"(.|\n)*"))
    allowed = anything.allowed_tokens()
    assert max(allowed) < VOCAB_SIZE and SPECIAL not in allowed and EOS in allowed
    with pytest.raises(AssertionError):
        anything.fill_mask(np.zeros(compiler.mask_words - 1, np.int32))


def test_forbidden_token_sets_a_lasting_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GrammarSpec("choice", '["yes"]'))
    assert not matcher.accept(encode("n")[0])
    assert matcher.error is not None and not matcher.is_complete


def test_fork_and_count_valid(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GrammarSpec("choice", '["abc", "abd"]'))
    walk(matcher, "ab")
    other = matcher.fork()
    assert other.accept(encode("d")[0]) and other.is_complete and not matcher.is_complete
    assert matcher.count_valid_prefix(encode("cx")) == 1 and not matcher.is_complete
    assert matcher.accept(encode("c")[0]) and matcher.is_complete


def test_cache_is_limited_and_matchers_are_independent(compiler: GrammarCompiler) -> None:
    grammars = [GrammarSpec("choice", json.dumps([f"w{i}"])) for i in range(MAX_CACHED_GRAMMARS + 5)]
    for grammar in grammars:
        assert accepts(compiler, grammar, json.loads(grammar.text)[0])
    assert len(compiler._compiled) == MAX_CACHED_GRAMMARS
    assert accepts(compiler, grammars[-1], f"w{MAX_CACHED_GRAMMARS + 4}") and accepts(compiler, grammars[0], "w0")


def test_white_space_is_limited(compiler: GrammarCompiler) -> None:
    assert accepts(compiler, OPEN, '{\n\t\t"a" : 1 }')
    assert not accepts(compiler, OPEN, "{" + "\n" * 65 + '"a": 1}')


DEEP = '{"items":' * 3000 + "{}" + "}" * 3000

REJECTED = [
    (schema(type="object", unevaluatedProperties=False), "unevaluatedProperties"),
    (schema(type="array", uniqueItems=True, items={"$dynamicRef": "#x"}), "$dynamicRef"),
    (schema(type="number", **{"not": {"const": 3}}), "a number outside"),
    (schema(type="array", uniqueItems=True, items={"pattern": "(?=a)"}), "pattern"),
    (schema(type="strin"), "strin"),
    (schema(type="string", minLength=5, maxLength=2), "minLength"),
    (schema(**{"$ref": "#/$defs/x"}), "$defs/x"),
    (schema(**{"$ref": "http://127.0.0.1:9/x"}), "127.0.0.1"),
    (schema(**{"$ref": "#"}), "no text can match"),
    (schema(type="string", pattern="(?!a)b"), "look-around"),
    (GrammarSpec("json_schema", "[1]"), "a JSON object"),
    (GrammarSpec("json_schema", '{"type":'), "Expecting value"),
    (GrammarSpec("json_schema", '{"const": "\\ud800"}'), "surrogate|hex escape"),
    (GrammarSpec("json_schema", DEEP), "nested too deeply|recursion"),
    (GrammarSpec("regex", "([a-z"), "unclosed"),
    (GrammarSpec("regex", r"(a)\1"), "backreferences"),
    (GrammarSpec("regex", "(" * 9999 + ")" * 9999), "nested"),
    (GrammarSpec("regex", r"[^\s\S]"), "no text can match"),
    (GrammarSpec("choice", "[]"), "one or more strings"),
    (GrammarSpec("choice", '["a", 1]'), "one or more strings"),
    (GrammarSpec("choice", json.dumps(["x"] * 10_001)), "10001"),
    (GrammarSpec("grammar", "start: nothing"), "nothing"),
    (GrammarSpec("grammar", "start: start"), "no text can match"),
    (GrammarSpec("grammar", "\x00}{"), "Expected name"),
    (GrammarSpec("grammar", ""), "root"),
    (GrammarSpec("grammar", '{"grammars": 1}'), "grammars"),
    (GrammarSpec("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000), ""),
    (GrammarSpec("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), str(MAX_GRAMMAR_CHARS)),
]


@pytest.mark.parametrize(("grammar", "says"), REJECTED, ids=[f"{g.kind}-{g.text[:30]}" for g, _ in REJECTED])
def test_errors_name_the_reason(compiler: GrammarCompiler, grammar: GrammarSpec, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(grammar, param="text.format")
    assert caught.value.param == "text.format" and len(caught.value.message) < 400
    assert any(part in caught.value.message for part in says.split("|"))


def test_cache_distinguishes_kinds(compiler: GrammarCompiler) -> None:
    assert accepts(compiler, GrammarSpec("regex", '["a"]'), "a") and accepts(
        compiler, GrammarSpec("choice", '["a"]'), "a"
    )
    assert accepts(compiler, GrammarSpec("regex", '["a"]'), '"') and not accepts(
        compiler, GrammarSpec("choice", '["a"]'), '"'
    )
