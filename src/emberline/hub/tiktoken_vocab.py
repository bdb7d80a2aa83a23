"""add_tokenizer: makes a tokenizer.json for a checkpoint that has a tiktoken.model instead, such as Kimi's.

A tiktoken.model has the tokens in the order in which they are merged, without the pairs that they are merged from.
"""

from __future__ import annotations

import base64
import binascii
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.jsonfile import read_object_if_exists
from emberline.hub.atomic_directory import atomic_directory, file_lock
from emberline.hub.gguftokenizer import KIMI_PATTERN

RANKS_FILE, TOKENIZER_FILE = "tiktoken.model", "tokenizer.json"
TOKENIZER_CLASS = "TikTokenTokenizer"  # in tokenizer_config.json; others may split words in another way
TOKENIZER_VERSION = 1  # part of the checkpoint's path: raise it when the result changes
MAX_RANKS_BYTES = 64 << 20
MAX_TOKEN_BYTES = 512
NO_RANK = 1 << 60
MAX_VOCAB = 1 << 22  # larger ids are rejected as damaged or malicious


def add_tokenizer(source: Path, target: Path) -> Path:
    """Make `target`, with links to all files of `source` and a tokenizer.json, unless it exists, and return it."""
    if target.is_dir():
        return target
    with file_lock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            text = build_tokenizer(source)
            with atomic_directory(target) as work:
                for file in source.iterdir():
                    if file.is_file():
                        (work / file.name).symlink_to(file.resolve())
                (work / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    return target


def build_tokenizer(directory: Path) -> str:
    """Return the text of a tokenizer.json. Raise ModelFileError for damaged files, UnsupportedModel for other kinds."""
    config = read_object_if_exists(directory / "tokenizer_config.json")
    if config.get("tokenizer_class") != TOKENIZER_CLASS:
        found = str(config.get("tokenizer_class"))[:80]
        raise UnsupportedModel(
            f"{directory / RANKS_FILE} belongs to the tokenizer_class {found!r}, which is not supported",
            hint="convert the model's tokenizer with transformers first",
        )
    ranks = _read_ranks(directory / RANKS_FILE)
    letters = _list_byte_letters()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [
        ("".join(letters[byte] for byte in left), "".join(letters[byte] for byte in right))
        for token, rank in ranks.items()
        if len(parts := _split_token(token, rank, ranks)) == 2
        for left, right in [parts]
    ]
    added = _list_added_tokens(config, len(ranks), directory)
    tokenizer = Tokenizer(models.BPE({**vocab, **added}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in added])
    return str(tokenizer.to_str())


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Return the tokens with their ranks, which are their ids, in the order of the ranks."""
    if file.stat().st_size > MAX_RANKS_BYTES:
        raise ModelFileError(f"{file} is too large: it has more than {MAX_RANKS_BYTES} bytes")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as e:
            message = f"{file}: line {number} must be a base64 token and its rank"
            raise ModelFileError(message, hint="download it again") from e
    expected = list(range(len(ranks)))
    if not ranks or list(ranks.values()) != expected or max(map(len, ranks)) > MAX_TOKEN_BYTES:
        raise ModelFileError(f"{file}: the ranks of the tokens must be 0, 1, 2 and so on", hint="download it again")
    return ranks


def _split_token(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the parts of a token after all merges with lower ranks than `rank`.

    There are two parts, which merge into the token, or more if no merge of two tokens gives this token."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, NO_RANK) for left, right in pairwise(parts)]
        lowest = min(found)
        if lowest >= rank:
            break
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _list_added_tokens(config: dict[str, Any], first: int, directory: Path) -> dict[str, int]:
    """Return the special tokens, whose ids follow those of the others. Ids without a name become reserved tokens."""
    decoder = config.get("added_tokens_decoder")
    try:
        names = {int(id_): str(token["content"]) for id_, token in decoder.items()} if decoder else {}
    except (AttributeError, KeyError, TypeError, ValueError):
        names = {}
    file, end = directory / "tokenizer_config.json", max(names, default=0) + 1
    if not names or min(names) < first or end > MAX_VOCAB:
        raise ModelFileError(f"{file} must have added_tokens_decoder with ids from {first} to {MAX_VOCAB - 1}")
    found = {names.get(id_, f"<|reserved_token_{id_}|>"): id_ for id_ in range(first, end)}
    if len(found) < end - first:
        raise ModelFileError(f"{file} has two ids for one token in added_tokens_decoder")
    return found


def _list_byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level vocabularies: itself, if it is printable."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


def describe_files(directory: Path) -> str:
    """Return a text that changes when a file of the directory does."""
    files = sorted((file.name, file.stat()) for file in directory.iterdir() if file.is_file())
    return json.dumps([str(directory.resolve()), *((name, s.st_size, s.st_mtime_ns) for name, s in files)])
