r"""GrammarCompiler and GrammarMatcher: compile a grammar and compute the allowed next tokens.

The library is llguidance (benchmarks/results/grammar-choice.json): it needs no torch and limits the work of every step.
The text of each kind of GrammarSpec:

    json_object   empty
    json_schema   a schema; keywords that cannot be enforced are checked when the value is complete, and a value that
                  violates them ends the request with an error. Keywords that cannot be checked are rejected by name.
    regex         Rust syntax, matched against the whole output; no look-around, no back-references;
                  \d, \w and \s match ASCII characters, in Lark's regexes too
    choice        a JSON array of strings
    grammar       Lark (llguidance's dialect), GBNF (it has `::=`), or several joined: llguidance's {"grammars": [...]}
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark

from emberline.core.errors import InvalidRequest
from emberline.core.json_schema import Schema, SchemaChecker, UncheckableSchema
from emberline.core.params import GrammarKind, GrammarSpec
from emberline.engine.ascii_classes import rewrite_lark, rewrite_regex
from emberline.engine.schema_rewriter import rewrite_schema

MAX_GRAMMAR_CHARS = 256 * 1024  # characters
MAX_CHOICES = 10_000
MAX_CACHED_GRAMMARS = 64
# Limited, because some small models would otherwise write newlines until max_tokens.
WHITESPACE_PATTERN = r"[\x20\x0A\x0D\x09]{1,64}"

UNENFORCED = "these keywords cannot be enforced:"

Mask = npt.NDArray[np.int32]


class GrammarMatcher:
    """The state of one request's grammar after the output tokens that were accepted.

    A mask has one bit for each token id of the model's vocabulary, 32 bits in an int32."""

    __slots__ = ("_inner", "_mask_words")

    def __init__(self, inner: llguidance.LLMatcher, words: int) -> None:
        self._inner = inner
        self._mask_words = words

    def fill_mask(self, mask: Mask) -> None:
        assert mask.dtype == np.int32 and mask.shape == (self._mask_words,) and mask.flags.c_contiguous
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def allowed_tokens(self) -> list[int]:
        mask = np.zeros(self._mask_words, np.int32)
        self.fill_mask(mask)
        bits: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        return bits

    def accept(self, token: int) -> bool:
        return self._inner.consume_token(token)

    def count_valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many tokens at the start of `tokens` the grammar allows next. The state does not change."""
        return self._inner.validate_tokens(list(tokens))

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must come next, as the tokenizer usually splits such text."""
        tokens: list[int] = self._inner.compute_ff_tokens()
        return tokens

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self._inner.deep_copy(), self._mask_words)

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-sequence token may follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def library_error(self) -> str | None:
        return _shorten_message(self._inner.get_error()) if self._inner.is_error() else None

    @property
    def error(self) -> str | None:
        """Why the request cannot continue: a forbidden token, a limit or a failed check; None if it can."""
        return self.library_error


class CheckedMatcher(GrammarMatcher):
    """A matcher that checks complete values against those schemas that their grammar does not enforce entirely."""

    __slots__ = ("_checkers", "_num_checked", "_violation")

    def __init__(self, inner: llguidance.LLMatcher, words: int, checkers: Mapping[str, SchemaChecker]) -> None:
        """`checkers`: by the name under which the grammar captures the value."""
        super().__init__(inner, words)
        self._checkers = checkers
        self._num_checked = 0  # captured values
        self._violation: str | None = None

    def accept(self, token: int) -> bool:
        is_allowed = super().accept(token)
        self._check_new_values()
        return is_allowed

    def fork(self) -> CheckedMatcher:
        copied = CheckedMatcher(self._inner.deep_copy(), self._mask_words, self._checkers)
        copied._num_checked, copied._violation = self._num_checked, self._violation
        return copied

    def _check_new_values(self) -> None:
        captured = self._inner.get_captures()
        for name, value in captured[self._num_checked :]:
            if self._violation is None and name in self._checkers:
                self._violation = self._checkers[name].find_violation(value.decode("utf-8", "replace"))
        self._num_checked = len(captured)

    @property
    def is_complete(self) -> bool:
        return self._violation is None and super().is_complete

    @property
    def error(self) -> str | None:
        return f"the value violates {self._violation}" if self._violation else super().error


def fill_masks(matchers: Sequence[GrammarMatcher], masks: Mask) -> None:
    """Write the mask of each matcher to the row of `masks` with the same index, in parallel."""
    assert masks.dtype == np.int32 and len(masks) == len(matchers) and masks.flags.c_contiguous
    if len(matchers) == 1:
        matchers[0].fill_mask(masks[0])
        return
    pairs = [(matcher._inner, i) for i, matcher in enumerate(matchers)]
    _shared_mask_executor().unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks[0].nbytes, len(masks))


@cache
def _shared_mask_executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor()


class GrammarCompiler:
    """Compiles grammars under the library's own limits.

    The grammars of requests must pass a GrammarGuard first, which also catches hangs and crashes."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        text = tokenizer.read_text("utf-8")
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[GrammarSpec, GrammarMatcher] = OrderedDict()
        self._lock = threading.Lock()  # protects _compiled; compiling itself runs without it
        self.mask_words = (vocab_size + 31) // 32

    def compile(self, grammar: GrammarSpec, param: str = "response_format") -> GrammarMatcher:
        if (cached := self.find_compiled(grammar)) is not None:
            return cached
        matcher = self._compile_uncached(grammar, param)
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher.fork()

    def find_compiled(self, grammar: GrammarSpec) -> GrammarMatcher | None:
        """Return a matcher if the grammar is already compiled, else None. This does not wait for a compilation."""
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].fork()

    def _compile_uncached(self, grammar: GrammarSpec, param: str) -> GrammarMatcher:
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise _grammar_error(
                grammar.kind, f"the text has {len(grammar.text)} characters; the limit is {MAX_GRAMMAR_CHARS}", param
            )
        matcher = self._match(grammar, param, _SpecWriter(splits_one_of=False))
        if isinstance(matcher, str) and "oneOf" in matcher:
            matcher = self._match(grammar, param, _SpecWriter(splits_one_of=True))
        if isinstance(matcher, str):
            raise _grammar_error(grammar.kind, matcher, param)
        matcher.allowed_tokens()  # sets `error` if no text can match
        if matcher.error is not None:
            is_empty = "NoExtension" in matcher.error
            raise _grammar_error(grammar.kind, "no text can match it" if is_empty else matcher.error, param)
        return matcher

    def _match(self, grammar: GrammarSpec, param: str, writer: _SpecWriter) -> GrammarMatcher | str:
        """Return a matcher, or the library's error."""
        try:
            spec = writer.write(grammar)
        except UncheckableSchema as error:
            raise _grammar_error(grammar.kind, f"{UNENFORCED} {error}", param) from None
        except Exception as error:  # the library's translator raises Exception itself
            raise _grammar_error(grammar.kind, str(error), param) from error
        inner = llguidance.LLMatcher(self._tokenizer, spec, log_level=0, limits=self._limits)
        if inner.is_error():
            return str(inner.get_error())
        if writer.checkers:
            return CheckedMatcher(inner, self.mask_words, writer.checkers)
        return GrammarMatcher(inner, self.mask_words)


class _SpecWriter:
    """Writes a GrammarSpec in the library's form, and collects the checkers of its schemas."""

    def __init__(self, splits_one_of: bool) -> None:
        self._splits_one_of = splits_one_of
        self.checkers: dict[str, SchemaChecker] = {}

    def write(self, grammar: GrammarSpec) -> str:
        match grammar.kind:
            case "json_object":
                return self._write_schema({"type": "object"})
            case "json_schema":
                schema = _parse_json(grammar.text)
                if not isinstance(schema, dict):
                    raise ValueError("a schema must be a JSON object")
                return self._write_schema(schema)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(rewrite_regex(grammar.text))
            case "choice":
                return _spec_from_choices(grammar.text)
            case "grammar":
                return self._write_grammar(grammar.text)

    def _write_schema(self, schema: Schema) -> str:
        return json.dumps({"grammars": self._write_schema_parts(schema, {}, is_lenient=False)})

    def _write_schema_parts(self, schema: Schema, part: dict[str, Any], is_lenient: bool) -> list[dict[str, Any]]:
        """Return `part` with the schema, and with a further part if complete values are checked.

        A lenient schema's unknown keywords are ignored."""
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE_PATTERN, "lenient": is_lenient}}
        if is_lenient:
            return [{**part, "json_schema": {**schema, **options}}]
        rewritten = rewrite_schema(schema, splits_one_of=self._splits_one_of)
        body = {**rewritten.schema, **options}
        if not rewritten.needs_check:
            return [{**part, "json_schema": body}]
        name = f"checked_{len(self.checkers)}"
        self.checkers[name] = SchemaChecker(schema)
        self.checkers[name].ensure_checkable()
        named = {key: value for key, value in part.items() if key != "json_schema"}
        capture = {**named, "lark_grammar": f'start[capture="{name}"]: @{name}_value'}
        return [capture, {"name": f"{name}_value", "json_schema": body}]

    def _write_grammar(self, text: str) -> str:
        if not text.lstrip().startswith("{"):
            return llguidance.grammar_from("lark", rewrite_lark(any_to_lark(text)))
        composed = _parse_json(text)
        parts = composed.get("grammars") if isinstance(composed, dict) else None
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ValueError(
                "a grammar in JSON must have the form "
                '{"grammars": [{"name": ..., "lark_grammar" or "json_schema": ...}, ...]}'
            )
        return json.dumps({"grammars": [each for part in parts for each in self._write_part(part)]})

    def _write_part(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one grammar of a {"grammars": [...]} list, translated from GBNF and with our own options.

        Of the client's x-guidance options only `lenient` is kept."""
        lark, schema = part.get("lark_grammar"), part.get("json_schema")
        if isinstance(lark, str):
            return [{**part, "lark_grammar": rewrite_lark(any_to_lark(lark) if "::=" in lark else lark)}]
        if isinstance(schema, dict):
            options = schema.get("x-guidance", {})
            is_lenient = isinstance(options, dict) and options.get("lenient") is True
            return self._write_schema_parts(schema, part, is_lenient)
        return [part]


def _spec_from_choices(text: str) -> str:
    choices = _parse_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a choice must be a JSON array of one or more strings, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"the array has {len(choices)} choices; the limit is {MAX_CHOICES}")
    return llguidance.grammar_from("choice", text)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _grammar_error(kind: GrammarKind, reason: str, param: str) -> InvalidRequest:
    hint = None
    if "Unimplemented keys" in reason:
        reason = f"{UNENFORCED} " + reason.partition("Unimplemented keys:")[2].strip()
    if reason.startswith(UNENFORCED):
        hint = "remove them, or check them in the reply"
    return InvalidRequest(f"the {kind} cannot be used: {_shorten_message(reason)}", param=param, hint=hint)


def _shorten_message(message: str) -> str:
    """Return the library's message without the grammar it quotes, which can be very long."""
    lines = [line.strip() for line in message.splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    context = [line for line in lines[1:] if line.startswith("while processing")]
    return " ".join([*(errors or lines)[:1], *context])[:300]
