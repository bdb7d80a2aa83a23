"""Intake: a Submission becomes the Requests of its n completions, or is refused."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from emberline.core.errors import ContextLengthExceeded, InvalidRequest
from emberline.core.request import Request, Submission


@dataclass(frozen=True, slots=True)
class Intake:
    max_context: int
    vocab_size: int
    publishes: bool  # whether other engines can have blocks from here

    def check(self, submission: Submission) -> None:
        prompt = submission.prompt
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if len(prompt) >= self.max_context:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_context} tokens, and the prompt has {len(prompt)}, "
                "which leaves none for the answer",
                param="prompt",
                hint="shorten the prompt, or serve with a larger --max-context or --kv-memory",
            )
        params = submission.params
        named = {
            "prompt": prompt,
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "resumed": [token for tokens in submission.resumed for token in tokens],
        }
        for name, ids in named.items():
            if ids and not self._knows(ids):
                raise InvalidRequest(f"{name} names a token outside [0, {self.vocab_size})", param=name)
        if len(submission.resumed) not in (0, params.n):
            raise InvalidRequest(f"{len(submission.resumed)} of {params.n} completions are resumed", param="resumed")
        if submission.publish:
            self._check_publish(submission)

    def requests(self, submission: Submission, arrival: float) -> list[Request]:
        prompt, params = submission.prompt, submission.params
        room = self.max_context - len(prompt)
        limit = len(prompt) + (room if params.max_tokens is None else min(params.max_tokens, room))
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        said = submission.resumed or ((),) * params.n
        return [
            Request(
                id=f"{submission.id}#{i}",
                parent=submission.id,
                index=i,
                prompt_len=len(prompt),
                tokens=[*prompt, *said[i]],
                params=params,
                seed=_child_seed(seed, i),
                limit=limit,
                priority=submission.priority,
                salt=submission.salt,
                arrival=arrival,
                deadline=arrival + submission.timeout,
                token_timeout=submission.token_timeout,
                leader=f"{submission.id}#0" if i else None,
                resumed=len(said[i]),
                source=submission.source if i == 0 and params.prompt_logprobs is None else None,
                publish=submission.publish,
            )
            for i in range(params.n)
        ]

    def _knows(self, ids: Iterable[int]) -> bool:
        """Whether all are tokens. numpy finds the largest of a long prompt in a third of the time."""
        try:
            return bool(np.frombuffer(array("Q", ids), np.uint64).max() < self.vocab_size)
        except OverflowError:  # one is below zero, or beyond 64 bits
            return False

    def _check_publish(self, submission: Submission) -> None:
        params = submission.params
        if not self.publishes:
            raise InvalidRequest("this engine keeps its blocks to itself", param="publish", hint="start it as a worker")
        if params.n != 1 or params.prompt_logprobs is not None:
            raise InvalidRequest("only one completion without prompt_logprobs can be published", param="publish")


def _child_seed(seed: int, index: int) -> int:
    """Completion 0 has the seed as given; the others follow from it."""
    if index == 0:
        return seed % (1 << 64)
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
