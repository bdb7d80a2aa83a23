"""Tokens to text as they arrive: whole characters only, stop strings found wherever token boundaries fall.

decoded text   [ emitted ............ | held: may begin a stop string ]  + bytes of a character still arriving
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
        continuing: bool = False,
        keep: frozenset[int] = frozenset(),
        at_least: int = 0,
    ) -> None:
        """`continuing`: the text goes on from a prompt, so a SentencePiece model's first space is really a space.
        `keep`: special tokens that are shown even if the others are skipped. `at_least`: the first so many tokens'
        text is not searched for stop strings."""
        if tokenizer.alphabet is Alphabet.OPAQUE:
            raise UnsupportedModel("this model's tokenizer cannot be decoded token by token")
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids - keep if skip_special else frozenset[int]()
        self._stops, self._include_stop = tuple(s for s in stop if s), include_stop
        self._at_least = at_least
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space and not continuing
        self._held = ""
        self._length = 0  # characters decoded so far, held ones included
        self.offsets: list[int] = []  # per token taken: where in the text it begins
        self.stopped: str | None = None

    def push(self, ids: Iterable[int]) -> str:
        """New text. Tokens after the one that completes a stop string are not taken: see `len(offsets)`."""
        if not self._stops:
            return "".join([self._take(i) for i in ids])
        out = []
        for i in ids:
            if self.stopped is not None:
                break
            out.append(self._release(self._take(i)))
        return "".join(out)

    def flush(self) -> str:
        """The rest, once no more tokens come: what was held, and half a character as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._release(self._text(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _take(self, id_: int) -> str:
        self.offsets.append(self._length)
        return "" if id_ in self._skip else self._text(self._token_bytes(id_))

    def _text(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        self._length += len(text)
        return text

    def _release(self, text: str) -> str:
        """The stop string that ends first wins, of those the longest: the same however the text was cut."""
        if len(self.offsets) <= self._at_least:
            return text
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        keep = max((_overlap(text, s) for s in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
