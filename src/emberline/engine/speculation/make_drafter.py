"""make_drafter: the Drafter that an engine's settings describe."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from emberline.core.engine_config import SpeculationConfig
from emberline.core.errors import InvalidRequest
from emberline.engine.speculation.drafter import Drafter
from emberline.engine.speculation.ngram import NgramProposer
from emberline.engine.speculation.prediction import PredictionProposer
from emberline.engine.speculation.proposer import Proposer
from emberline.engine.speculation.suffix import SuffixProposer


def make_drafter(
    config: SpeculationConfig,
    find_library: Callable[[], ctypes.CDLL | None],
    max_rows: int | None = None,
    *,
    continues_on_device: bool = False,
) -> Drafter | None:
    """Return the drafter of an engine; None if speculation is off.

    `max_rows`, `continues_on_device`: arguments of Drafter. `find_library`: returns the native library, or None if it
    cannot be built; then the method auto uses n-grams, and suffix raises InvalidRequest."""
    if config.speculate == "off":
        return None
    if config.uses_draft_model:
        return Drafter(
            [PredictionProposer()],
            config.max_draft_tokens,
            max_rows=max_rows,
            uses_draft_model=True,
            continues_on_device=continues_on_device,
        )
    proposer: Proposer = NgramProposer()
    if config.speculate != "ngram" and (library := find_library()) is not None:
        proposer = SuffixProposer(library)
    elif config.speculate == "suffix":
        message = "speculate is suffix, which needs the native library, and that library could not be built"
        raise InvalidRequest(message, param="speculate", hint="install a C++ compiler, or use --speculate ngram")
    return Drafter([PredictionProposer(), proposer], config.max_draft_tokens, max_rows=max_rows)
