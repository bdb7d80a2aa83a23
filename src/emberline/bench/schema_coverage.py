"""Measures how many JSON schemas of a directory are accepted, and how many outputs under them are valid.

python -m emberline.bench.schema_coverage DIR --json benchmarks/results/schema-coverage.json

DIR holds one schema in each .json file, such as the folder `data` of the repository guidance-ai/jsonschemabench.
Outputs are made without a model: each token is drawn from those that the grammar allows, and ends of values are
preferred. They are validated by jsonschema_rs, which is in the extra `test`. With --library llguidance or xgrammar the
library is measured without Emberline's rewriting and checks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from emberline.bench import machine
from emberline.bench import report as reports
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec

MAX_OUTPUT_TOKENS = 1500  # bytes
CLOSING_AFTER = 200  # tokens; from then on values end as early as possible
MAX_REASON_CHARS = 90
# Formats that Emberline takes as annotations, as the standard says, and that the validator checks.
ANNOTATION_FORMATS = (
    "regex",
    "json-pointer",
    "relative-json-pointer",
    "uri-reference",
    "iri-reference",
    "uri-template",
)
NUM_BYTES, EOS = 256, 256

_NUMBERS = re.compile(r"\d+")
_NAMES = re.compile(r'"[^"]{3,}"|\'[^\']{3,}\'|/\^?.*')


class DrawnOutputMatcher(Protocol):
    """The state of a grammar after some tokens. Tokens are bytes; EOS ends the output."""

    def allowed_tokens(self) -> list[int]: ...

    def accept(self, token: int) -> bool: ...

    @property
    def error(self) -> str | None: ...


class SchemaLibrary(Protocol):
    name: str

    def compile(self, schema: str) -> DrawnOutputMatcher:
        """Raises ValueError with the reason if the schema is refused."""
        ...


class EmberlineSchemas:
    """What a request's schema goes through: a trial in a child process, then the compilation."""

    name = "emberline"

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        from emberline.engine.grammar import GrammarCompiler
        from emberline.engine.grammar_guard import GrammarGuard, GrammarTrialProcess

        self._guard = GrammarGuard(GrammarTrialProcess(tokenizer, vocab_size, [EOS]))
        self._compiler = GrammarCompiler(tokenizer, vocab_size, [EOS])

    def compile(self, schema: str) -> DrawnOutputMatcher:
        grammar = GrammarSpec("json_schema", schema)
        try:
            self._guard.check(grammar)
            return self._compiler.compile(grammar)
        except InvalidRequest as error:
            raise ValueError(error.message) from None


class LLGuidanceSchemas:
    """llguidance with its default options."""

    name = "llguidance"

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(tokenizer.read_text("utf-8"), n_vocab=vocab_size, eos_token=[EOS])
        self._words = (vocab_size + 31) // 32

    def compile(self, schema: str) -> DrawnOutputMatcher:
        from emberline.engine.grammar import GrammarMatcher

        grammar = self._library.LLMatcher.grammar_from_json_schema(schema)
        inner = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if inner.is_error():
            raise ValueError(inner.get_error().splitlines()[0])
        return GrammarMatcher(inner, self._words)


class XGrammarSchemas:
    """xgrammar with the options that vLLM passes. vLLM itself refuses some keywords before."""

    name = "xgrammar"

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        import xgrammar

        self._library = xgrammar
        vocabulary = json.loads(tokenizer.read_text("utf-8"))["model"]["vocab"]
        names = sorted(vocabulary, key=vocabulary.__getitem__) + ["<|end|>"]
        info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> DrawnOutputMatcher:
        if keyword := find_keyword_refused_by_vllm(json.loads(schema)):
            raise ValueError(f"vLLM refuses {keyword} with xgrammar")
        try:
            return _XGrammarMatcher(
                self._library.GrammarMatcher(self._compiler.compile_json_schema(schema, any_whitespace=True))
            )
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None


class _XGrammarMatcher:
    error = None

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def allowed_tokens(self) -> list[int]:
        import numpy as np

        mask = np.full((1, (NUM_BYTES + 1 + 31) // 32), -1, np.int32)
        self._inner.fill_next_token_bitmask(mask)
        bits: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        return [token for token in bits if token <= EOS]

    def accept(self, token: int) -> bool:
        return bool(self._inner.accept_token(token))


_FORMATS_OF_XGRAMMAR = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
)


def find_keyword_refused_by_vllm(schema: Any) -> str | None:
    """Return a keyword for which vLLM does not use xgrammar in this schema or a nested one."""
    if isinstance(schema, list):
        return next((found for each in schema if (found := find_keyword_refused_by_vllm(each))), None)
    if not isinstance(schema, dict):
        return None
    types = schema.get("type")
    named = {each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)}
    refused: list[tuple[str, bool]] = []
    if named & {"integer", "number"}:
        refused.append(("multipleOf", "multipleOf" in schema))
    if "array" in named:
        refused += [(key, key in schema) for key in ("uniqueItems", "contains", "minContains", "maxContains")]
    if "string" in named:
        refused.append(("format", schema.get("format", "uri") not in _FORMATS_OF_XGRAMMAR))
        refused.append(("a length beside pattern or format", _has_length_beside_pattern(schema)))
    if "object" in named:
        patterns, names = schema.get("patternProperties"), schema.get("propertyNames")
        others = "properties" in schema or isinstance(schema.get("additionalProperties"), dict)
        refused.append(("propertyNames", names is not None and (others or patterns is not None)))
        refused.append(("propertyNames", isinstance(names, dict) and _has_length_beside_pattern(names)))
        is_mixed = isinstance(patterns, dict) and ("properties" in schema or len(patterns) > 1)
        refused.append(("patternProperties", is_mixed))
    own = next((keyword for keyword, is_refused in refused if is_refused), None)
    return own or next((found for each in schema.values() if (found := find_keyword_refused_by_vllm(each))), None)


def _has_length_beside_pattern(schema: dict[str, Any]) -> bool:
    return bool(schema.keys() & {"pattern", "format"}) and bool(schema.keys() & {"minLength", "maxLength"})


@dataclass(slots=True)
class Coverage:
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # why schemas were refused
    errors: Counter[str] = field(default_factory=Counter)  # that ended outputs, such as a failed check
    invalid: list[str] = field(default_factory=list)  # file, error and output


def measure(library: SchemaLibrary, files: list[Path], outputs_per_schema: int) -> Coverage:
    coverage = Coverage()
    for file in files:
        text = file.read_text("utf-8")
        coverage.counts["schemas"] += 1
        try:
            library.compile(text)
        except ValueError as error:
            coverage.counts["refused"] += 1
            coverage.reasons[_shorten_reason(str(error))] += 1
            continue
        is_valid = make_validator(text)
        for seed in range(outputs_per_schema):
            output, ending = draw_output(library.compile(text), random.Random(f"{file.name} {seed}"))
            coverage.counts[ending] += 1
            if ending == "error":
                coverage.errors[_shorten_reason(output.split(" at ")[0])] += 1
            elif ending == "finished":
                verdict = is_valid(output)
                coverage.counts[verdict] += 1
                if verdict == "invalid":
                    coverage.invalid.append(f"{file.parent.name}/{file.name}: {output[:300]}")
    return coverage


def draw_output(matcher: DrawnOutputMatcher, rng: random.Random) -> tuple[str, str]:
    """Return an output and how it ended: finished, too_long, stuck, or error (then the error, not the output)."""
    output = bytearray()
    for step in range(MAX_OUTPUT_TOKENS):
        allowed = matcher.allowed_tokens()
        if matcher.error is not None:
            return matcher.error, "error"
        if not allowed:
            return output.decode("utf-8", "replace"), "stuck"
        weights = [_weight(token, step > CLOSING_AFTER) for token in allowed]
        token = rng.choices(allowed, weights)[0]
        if token == EOS:
            return output.decode("utf-8", "replace"), "finished"
        is_accepted = matcher.accept(token)
        if matcher.error is not None:
            return matcher.error, "error"
        if not is_accepted:
            return output.decode("utf-8", "replace"), "stuck"
        output.append(token)
    return output.decode("utf-8", "replace"), "too_long"


def _weight(token: int, is_closing: bool) -> float:
    if token == EOS:
        return 200.0
    char = chr(token)
    if char in '"}]':
        return 1e6 if is_closing else 20.0
    if char in ":,":
        return 10.0 if is_closing else 5.0
    if char.isalnum() and token < 128:
        return 1.0
    return 0.02 if token > 127 or char in " \n\t\r\\" else 0.3


def make_validator(schema: str) -> Any:
    """Return a function that says of an output: valid, invalid or not_validated."""
    import jsonschema_rs

    try:
        annotations = dict.fromkeys(ANNOTATION_FORMATS, lambda text: True)
        validator = jsonschema_rs.validator_for(json.loads(schema), validate_formats=True, formats=annotations)
    except (ValueError, jsonschema_rs.ReferencingError):
        return lambda output: "not_validated"

    def judge(output: str) -> str:
        try:
            return "valid" if validator.is_valid(read_output(output)) else "invalid"
        except ValueError:
            return "invalid"

    return judge


def read_output(output: str) -> Any:
    """Return the value of JSON text. Numbers stay finite, which no standard demands of a grammar."""
    return json.loads(output, parse_float=_read_number)


def _read_number(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # the exponent has too many digits
        return Decimal("1e999")


def _shorten_reason(reason: str) -> str:
    return _NUMBERS.sub("N", _NAMES.sub("..", reason))[:MAX_REASON_CHARS]


def write_byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose tokens are the 256 bytes and one that ends the output."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The order of byte-level BPE: each printable byte is its own character, the others follow.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(NUM_BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


LIBRARIES: dict[str, type[EmberlineSchemas] | type[LLGuidanceSchemas] | type[XGrammarSchemas]] = {
    each.name: each for each in (EmberlineSchemas, LLGuidanceSchemas, XGrammarSchemas)
}


def make_report(args: argparse.Namespace, coverage: Coverage, num_files: int) -> dict[str, Any]:
    counts = coverage.counts
    units = {"schemas": "schemas", "refused": "schemas"}
    order = ("schemas", "refused", "finished", "valid", "invalid", "not_validated", "error", "too_long", "stuck")
    results = {name: {"value": counts[name], "unit": units.get(name, "outputs")} for name in order}
    results["refused_share"] = {"value": round(100 * counts["refused"] / max(1, num_files), 2), "unit": "%"}
    package = {"xgrammar": "xgrammar"}.get(args.library, "llguidance")
    return {
        "bench": f"schema-coverage-{args.library}",
        "command": f"python -m emberline.bench.schema_coverage {args.directory.name} --library {args.library}",
        "commit": machine.describe_commit(args.commit),
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count(), "system": platform.platform()},
        "software": {"python": platform.python_version(), package: version(package)},
        "config": {
            "files": num_files,
            "every": args.every,
            "outputs_per_schema": args.outputs,
            "max_output_bytes": MAX_OUTPUT_TOKENS,
            "refused_because": dict(coverage.reasons.most_common()),
            "errors": dict(coverage.errors.most_common()),
        },
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--library", choices=sorted(LIBRARIES), default="emberline")
    parser.add_argument("--every", type=int, default=1, help="measure one file of so many")
    parser.add_argument("--outputs", type=int, default=2, help="outputs for each schema")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    files = sorted(args.directory.rglob("*.json"))[:: args.every]
    with tempfile.TemporaryDirectory() as folder:
        library = LIBRARIES[args.library](write_byte_tokenizer(Path(folder)), NUM_BYTES + 1)
        coverage = measure(library, files, args.outputs)
    done = make_report(args, coverage, len(files))
    for name, row in done["results"].items():
        print(f"{name:20}{row['value']:>10} {row['unit']}")
    for reason, count in coverage.reasons.most_common():
        print(f"{count:6} {reason}")
    for line in coverage.invalid:
        print(f"invalid: {line}")
    print(json.dumps(done))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(done, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
