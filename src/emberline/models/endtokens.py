"""end_tokens: the ids at which a model's turn ends, as any of its files has them. Torch-free.

config.json often knows only where a text ends; of a chat model's turn generation_config.json knows, or the tokenizer's
config alone, which has not the id but what it looks like.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.models.fields import Fields

ADDED = re.compile(r'"added_tokens"\s*:\s*')


def end_tokens(checkpoint: Checkpoint, vocab: int) -> tuple[int, ...]:
    """Without those that a model with so many tokens cannot say."""
    sources = {"config.json": checkpoint.config, "generation_config.json": checkpoint.generation_config}
    ids = [token for where, values in sources.items() for token in Fields(values, where).ids("eos_token_id")]
    return tuple(token for token in dict.fromkeys([*ids, *_of_tokenizer(checkpoint)]) if token < vocab)


def _of_tokenizer(checkpoint: Checkpoint) -> list[int]:
    eos = checkpoint.tokenizer_config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        return []
    added = _added_tokens(checkpoint.directory / "tokenizer.json")
    ours = (Fields(token, "tokenizer.json") for token in added if token.get("content") == text)
    return [id_ for token in ours for id_ in token.ids("id")]


def _added_tokens(tokenizer: Path) -> list[dict[str, Any]]:
    """Those with a meaning of their own. They are written before the vocabulary, which a start need not wait for."""
    try:
        text = tokenizer.read_text("utf-8")
        found = ADDED.search(text)
        added = json.JSONDecoder().raw_decode(text, found.end())[0] if found else []
    except FileNotFoundError:
        return []  # served with ids alone
    except (OSError, ValueError, RecursionError) as e:
        raise ModelFileError(f"cannot read the added tokens of {tokenizer}: {e}") from e
    return [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
