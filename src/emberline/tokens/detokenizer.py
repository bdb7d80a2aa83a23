"""Detokenizer: turns tokens into text as they arrive, in whole characters, and finds stop strings.

A stop string may begin and end inside a token. Text that may be the beginning of a stop string is held back:

decoded text   [ emitted ............ | held: may begin a stop string ]  + bytes of an incomplete character
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from emberline.core.errors import UnsupportedModel
from emberline.tokens.tokenizer import Alphabet, Tokenizer


class Detokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        continues_prompt: bool = False,
        shown_special_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """Raises UnsupportedModel if the tokenizer cannot decode single tokens.

        `continues_prompt`: the text continues a prompt, so the first space of a SentencePiece model is kept.
        `shown_special_ids`: special tokens that are part of the text even if `skip_special` is set. `min_tokens`: the
        number of first tokens in whose text stop strings are ignored."""
        if tokenizer.alphabet is Alphabet.OPAQUE:
            raise UnsupportedModel("the model's tokenizer cannot decode single tokens, which text generation needs")
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = tokenizer.special_ids - shown_special_ids if skip_special else frozenset[int]()
        self._stops, self._include_stop = tuple(s for s in stop if s), include_stop
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_first_space = tokenizer.strips_first_space and not continues_prompt
        self._held_text = ""
        self._length = 0  # characters decoded so far, including held ones
        self.offsets: list[int] = []  # of each token so far: where its text begins
        self.matched_stop: str | None = None  # the stop string that was found

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that can be sent now.

        Tokens after a complete stop string are ignored. The attribute `offsets` has one item for each token that was
        used."""
        if not self._stops:
            return "".join([self._decode_token(i) for i in ids])
        out = []
        for i in ids:
            if self.matched_stop is not None:
                break
            out.append(self._hold_stop_prefix(self._decode_token(i)))
        return "".join(out)

    def flush(self) -> str:
        """Return the text that was held back, after the last token. An incomplete character becomes U+FFFD."""
        if self.matched_stop is not None:
            return ""
        text = self._hold_stop_prefix(self._decode_bytes(b"", final=True))
        held, self._held_text = self._held_text, ""
        return text + held

    def _decode_token(self, id_: int) -> str:
        self.offsets.append(self._length)
        return "" if id_ in self._skipped_ids else self._decode_bytes(self._token_bytes(id_))

    def _decode_bytes(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._strips_first_space and text:
            text, self._strips_first_space = text.removeprefix(" "), False
        self._length += len(text)
        return text

    def _hold_stop_prefix(self, text: str) -> str:
        """Return the text that can be sent now, and keep text that may be the start of a stop string.

        If a stop string is complete, `matched_stop` is set. If several match, the one that ends first is used; of
        several that end at the same character, the longest. So the result does not depend on how the text is split into
        tokens."""
        if len(self.offsets) <= self._min_tokens:
            return text
        text = self._held_text + text
        matches = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if matches:
            end, start, self.matched_stop = min(matches)
            self._held_text = ""
            return text[: end if self._include_stop else start]
        keep = max((_stop_prefix_length(text, s) for s in self._stops), default=0)
        cut = len(text) - keep
        self._held_text = text[cut:]
        return text[:cut]


def _stop_prefix_length(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
