"""Tokenizer: converts text to token ids, and token ids to the bytes of the text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import tokenizers

from emberline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Alphabet(Enum):
    """How the tokens of a vocabulary are written as text."""

    BYTE_LEVEL = "byte-level"  # GPT-2: each byte is a printable character
    PIECES = "pieces"  # SentencePiece: ▁ for a space, <0xAB> for a byte
    OPAQUE = "opaque"  # others, for example WordPiece: usable for encoding, not for generation


class Tokenizer:
    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # the engine checks lengths
        inner.no_padding()
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        added = inner.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self.alphabet, self.strips_first_space = _detect_alphabet(inner.decoder)
        self._byte_of = _build_gpt2_byte_table() if self.alphabet is Alphabet.BYTE_LEVEL else {}
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(
                f"the model directory {directory} has no tokenizer.json",
                hint="convert the model's tokenizer with transformers first",
            )
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # the library raises Exception itself, and its panics are not even that
            raise ModelFileError(f"{path} cannot be loaded as a tokenizer: {e}") from e
        return Tokenizer(inner)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return self.encode_batch([text], add_special)[0]

    def encode_batch(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        try:
            return [e.ids for e in self._inner.encode_batch_fast(texts, add_special_tokens=add_special)]
        except (UnicodeEncodeError, TypeError) as e:
            raise InvalidRequest(
                "the text is not valid Unicode: it contains half of a surrogate pair",
                hint="send text that can be encoded as UTF-8",
            ) from e
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # a panic of the library, such as a pattern that backtracks too often
            raise InvalidRequest(
                f"the text cannot be converted to tokens: {str(e)[:200]}",
                hint="shorten the text, or break long runs of the same character",
            ) from e

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self.alphabet is Alphabet.OPAQUE:
            return str(self._inner.decode(list(ids), skip_special_tokens=skip_special))
        skip = self.special_ids if skip_special else ()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes that the token adds to a text. A padding id, which stands for no token, adds none."""
        data = self._bytes.get(id_)
        if data is None:
            data = self._bytes[id_] = self._decode_token(id_)
        return data

    def token_text(self, id_: int) -> str:
        return self.token_bytes(id_).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        found: int | None = self._inner.token_to_id(token)
        return found

    def _decode_token(self, id_: int) -> bytes:
        token = self._inner.id_to_token(id_) if 0 <= id_ < 1 << 31 else None
        if token is None:
            return b""
        if self.alphabet is Alphabet.BYTE_LEVEL:
            plain = id_ in self._added_ids or any(c not in self._byte_of for c in token)
            return token.encode() if plain else bytes(self._byte_of[c] for c in token)
        if self.alphabet is Alphabet.PIECES:
            byte = BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
        return str(self._inner.decode([id_], skip_special_tokens=False)).encode()


def _detect_alphabet(decoder: Any) -> tuple[Alphabet, bool]:
    """Return how tokens are written as text, and whether decoding removes the first space of a text.

    SentencePiece models add that space when they encode a text."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return Alphabet.BYTE_LEVEL, False
    if "Metaspace" in kinds:
        return Alphabet.PIECES, kinds["Metaspace"].get("prepend_scheme") != "never"
    if kinds.get("Replace", {}).get("pattern") == {"String": "▁"}:
        return Alphabet.PIECES, kinds.get("Strip", {}).get("start", 0) > 0
    return Alphabet.OPAQUE, False


def _build_gpt2_byte_table() -> dict[str, int]:
    """Return the mapping from characters to bytes that GPT-2's tokenizer uses.

    A printable Latin-1 character is mapped to its own byte. The other bytes are represented by the characters from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
