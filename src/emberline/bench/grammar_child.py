"""Runs one grammar library for `emberline.bench.grammar`, in its own process.

The process reads cases as JSON lines and prints the cost of each case. A case that takes too long ends the process; the
parent process reports a hang or a crash of the library as the result of the case. All times are CPU time of this
thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from emberline.core.params import GrammarSpec

DEADLINE_S = 10.0

Mask = npt.NDArray[np.int32]


class LibraryMatcher(Protocol):
    def fill_mask(self, mask: Mask) -> None: ...

    def accept_token(self, token: int) -> bool: ...


class GrammarLibrary(Protocol):
    def compile(self, grammar: GrammarSpec) -> LibraryMatcher: ...


class LLGuidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def fill_mask(self, mask: Mask) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())

    def accept_token(self, token: int) -> bool:
        return bool(self.matcher.consume_token(token))


class LLGuidance:
    def __init__(self, tokenizer_json: str, vocab: list[str], eos: int) -> None:
        import llguidance

        self.library = llguidance
        self.tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=len(vocab), eos_token=eos)

    def compile(self, grammar: GrammarSpec) -> LLGuidanceMatcher:
        text = '{"type":"object"}' if grammar.kind == "json_object" else grammar.text
        form: Any = "json_schema" if grammar.kind == "json_object" else grammar.kind
        matcher = self.library.LLMatcher(self.tokenizer, self.library.grammar_from(form, text), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return LLGuidanceMatcher(matcher)


class XGrammarMatcher:
    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def fill_mask(self, mask: Mask) -> None:
        if not self.matcher.fill_next_token_bitmask(mask[None, :]):
            mask.fill(-1)  # -1 allows every token

    def accept_token(self, token: int) -> bool:
        return bool(self.matcher.accept_token(token))


class XGrammar:
    def __init__(self, tokenizer_json: str, vocab: list[str], eos: int) -> None:
        import xgrammar

        self.library = xgrammar
        info = xgrammar.TokenizerInfo(vocab, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[eos])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: GrammarSpec) -> XGrammarMatcher:
        return XGrammarMatcher(self.library.GrammarMatcher(self._compile_grammar(grammar)))

    def _compile_grammar(self, grammar: GrammarSpec) -> Any:
        match grammar.kind:
            case "json_object":
                return self.compiler.compile_json_schema('{"type":"object"}', strict_mode=False)
            case "json_schema":
                return self.compiler.compile_json_schema(grammar.text, strict_mode=False)
            case "regex":
                return self.compiler.compile_regex(grammar.text)
            case "choice":
                return self.compiler.compile_grammar(
                    "root ::= " + " | ".join(map(json.dumps, json.loads(grammar.text)))
                )
            case "grammar":
                return self.compiler.compile_grammar(grammar.text)


LIBRARIES: dict[str, type[LLGuidance] | type[XGrammar]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def measure_case(library: GrammarLibrary, grammar: GrammarSpec, tokens: list[int], vocab_size: int) -> dict[str, Any]:
    start = time.thread_time()
    try:
        matcher = library.compile(grammar)
        compile_s = time.thread_time() - start
        mask = np.zeros((vocab_size + 31) // 32, np.int32)
        fills: list[float] = []
        for at, token in enumerate([*tokens, -1]):
            start = time.thread_time()
            matcher.fill_mask(mask)
            fills.append(time.thread_time() - start)
            if token < 0:
                break
            if not (mask[token // 32] >> (token % 32)) & 1 or not matcher.accept_token(token):
                return {"compile_s": compile_s, "fills": fills, "refused_at": at}
    except Exception as error:  # any error of the library is a result
        return {"error": f"{type(error).__name__}: {error}"[:200], "seconds": time.thread_time() - start}
    return {"compile_s": compile_s, "fills": fills}


def rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(library_name: str, tokenizer_file: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    size = tokenizer.get_vocab_size()
    vocab = [tokenizer.id_to_token(i) or "" for i in range(size)]
    before = rss_mb()
    start = time.thread_time()
    __import__(library_name)
    imported = time.thread_time()
    library = LIBRARIES[library_name](Path(tokenizer_file).read_text("utf-8"), vocab, eos=2)
    ready = {"import_s": imported - start, "tokenizer_s": time.thread_time() - imported, "rss_mb": rss_mb() - before}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        tokens = tokenizer.encode(case["sample"], add_special_tokens=False).ids
        signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)  # unhandled, so the signal ends the process
        result = measure_case(library, GrammarSpec(case["kind"], case["text"]), tokens, size)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({**result, "rss_mb": rss_mb() - before}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
