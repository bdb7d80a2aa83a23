"""OutputQueue: the outputs of one submission that its reader has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque

from emberline.core.errors import EmberlineError
from emberline.core.events import Output


class OutputQueue:
    def __init__(self, *, merges: bool) -> None:
        """`merges`: whether outputs that the reader has not taken yet are merged into one.

        A slow reader then gets several tokens at a time, instead of falling further behind."""
        self._merges = merges
        self._items: deque[Output | EmberlineError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Output | EmberlineError) -> None:
        items = self._items
        if self._merges and items and isinstance(item, Output) and merge_outputs(items[-1], item):
            return
        items.append(item)
        if (waiter := self._waiter) is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def put_tokens(
        self, submission_id: str, index: int, tokens: list[int], drafted_tokens: int = 0, accepted_tokens: int = 0
    ) -> None:
        """Put an output that has only tokens, some of which may have been drafted."""
        if self._merges and self._items:
            last = self._items[-1]
            if isinstance(last, Output) and can_append_tokens(last, index):
                last.tokens += tokens
                last.drafted_tokens += drafted_tokens
                last.accepted_tokens += accepted_tokens
                return
        self.put(Output(submission_id, index, tokens, drafted_tokens=drafted_tokens, accepted_tokens=accepted_tokens))

    async def get(self) -> Output | EmberlineError:
        """Wait for the next output or error and return it. Only one task may wait at a time."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


def merge_outputs(earlier: Output | EmberlineError, later: Output) -> bool:
    """Merge the output `later` into `earlier`; return False if the two must stay separate."""
    if isinstance(earlier, EmberlineError) or not can_append_tokens(earlier, later.index):
        return False
    if later.error is not None or later.ticket is not None or later.prompt_logprobs is not None:
        return False
    earlier.tokens += later.tokens
    earlier.logprobs += later.logprobs
    earlier.finish, earlier.stop_token = later.finish, later.stop_token
    earlier.timing = later.timing or earlier.timing
    earlier.drafted_tokens += later.drafted_tokens
    earlier.accepted_tokens += later.accepted_tokens
    return True


def can_append_tokens(output: Output, index: int) -> bool:
    """Return whether tokens of completion `index` may be appended to this output."""
    return output.index == index and output.finish is None and output.error is None and output.ticket is None
