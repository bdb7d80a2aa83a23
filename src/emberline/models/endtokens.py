"""collect_end_tokens: finds, in all files of a checkpoint, the ids of tokens that end the output.

config.json often has only the end-of-text token. The token that ends a chat model's turn is in generation_config.json,
or only in the tokenizer's config, as text without its id, or in no file, so that the model's family decides.

This module does not import torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.models.fields import ConfigFields

ADDED_TOKENS_PATTERN = re.compile(r'"added_tokens"\s*:\s*')


def collect_end_tokens(checkpoint: Checkpoint, vocab_size: int, turn_ends: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Return the ids of the tokens that end the output; ids that are not below `vocab_size` are dropped.

    `turn_ends`: texts of tokens that end a turn if the tokenizer has them.
    """
    sources = {"config.json": checkpoint.config, "generation_config.json": checkpoint.generation_config}
    ids = [token for where, values in sources.items() for token in ConfigFields(values, where).id_list("eos_token_id")]
    return tuple(
        token
        for token in dict.fromkeys([*ids, *_read_tokenizer_end_tokens(checkpoint, turn_ends)])
        if token < vocab_size
    )


def _read_tokenizer_end_tokens(checkpoint: Checkpoint, turn_ends: tuple[str, ...]) -> list[int]:
    eos = checkpoint.tokenizer_config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    texts = [text, *turn_ends] if isinstance(text, str) else turn_ends
    if not texts:
        return []
    added = _read_added_tokens(checkpoint.directory / "tokenizer.json")
    matching = (ConfigFields(token, "tokenizer.json") for token in added if token.get("content") in texts)
    return [id_ for token in matching for id_ in token.id_list("id")]


def _read_added_tokens(tokenizer: Path) -> list[dict[str, Any]]:
    """Return `added_tokens` of tokenizer.json.

    The vocabulary after it is not parsed, because that is slow.
    """
    try:
        text = tokenizer.read_text("utf-8")
        found = ADDED_TOKENS_PATTERN.search(text)
        added = json.JSONDecoder().raw_decode(text, found.end())[0] if found else []
    except FileNotFoundError:
        return []  # a model without a tokenizer is served with token ids only
    except (OSError, ValueError, RecursionError) as e:
        raise ModelFileError(f"cannot read the added tokens of {tokenizer}: {e}") from e
    return [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
