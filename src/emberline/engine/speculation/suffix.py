"""SuffixProposer: guesses that the newest tokens of a request continue as they did where they occurred before.

Earlier occurrences are looked up in the request itself, in the prediction that the client sent, and in earlier outputs
of the same tenant. Longer matches count more."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass

from emberline.core.request import Request
from emberline.engine.speculation.proposer import EMPTY_PROPOSAL, Proposal
from emberline.kernels.cpu.suffix_index import END_OF_TEXT, SuffixIndex

TENANT_TOKENS = 1 << 16  # tokens of earlier outputs that are kept for each tenant, in 1.5 MB
MAX_TENANTS = 64  # whose outputs are kept; those of the tenant without a request for the longest time are dropped
MIN_OUTPUT = 16  # tokens of an output that is worth keeping


@dataclass(slots=True)
class IndexedRequest:
    index: SuffixIndex
    size: int = 0  # tokens of the request that are in the index


class SuffixProposer:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._requests: dict[str, IndexedRequest] = {}
        self._tenants: OrderedDict[str, SuffixIndex] = OrderedDict()  # by salt, the least recently used first

    def propose(self, request: Request, limit: int) -> Proposal:
        indexed = self._requests.get(request.id)
        if indexed is None:
            indexed = self._requests[request.id] = IndexedRequest(SuffixIndex(self._library))
            if request.prediction:
                indexed.index.append([*request.prediction, END_OF_TEXT])
        if indexed.size < len(request.tokens):
            indexed.index.append(request.tokens[indexed.size :])
            indexed.size = len(request.tokens)
        tokens, confidence = indexed.index.propose(limit, self._tenants.get(request.salt))
        return Proposal(tokens, confidence) if tokens else EMPTY_PROPOSAL

    def forget(self, request: Request) -> None:
        """Drop the index of a request that has ended, and keep its output for later requests of its tenant."""
        self._requests.pop(request.id, None)
        if request.output_len < MIN_OUTPUT:
            return
        outputs = self._tenants.get(request.salt)
        if outputs is None:
            outputs = self._tenants[request.salt] = SuffixIndex(self._library, TENANT_TOKENS)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(request.salt)
        outputs.append([*request.tokens[request.prompt_len :], END_OF_TEXT])
