"""OutputQueue: a fast reader gets each output, a slow one gets them merged, without loss or duplicates."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import EngineFailed
from emberline.core.events import Output, Stats, Timing
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason
from emberline.engine.messages import EngineMessageDecoder, EngineUpdate, compact_outputs, encode_message
from emberline.engine.output_queue import OutputQueue


def take_all(queue: OutputQueue, count: int) -> list[Output]:
    async def take() -> list[Output]:
        items = [await asyncio.wait_for(queue.get(), 10) for _ in range(count)]
        assert all(isinstance(item, Output) for item in items)
        return items  # type: ignore[return-value]

    return asyncio.run(take())


def test_waiting_outputs_merge() -> None:
    queue = OutputQueue(merges=True)
    queue.put(Output("a", tokens=[1], logprobs=[TokenLogprob(-1.0, 1, [])], cached_tokens=7, timing=Timing(1.0)))
    queue.put(Output("a", tokens=[2], logprobs=[TokenLogprob(-2.0, 1, [])], drafted_tokens=4, accepted_tokens=1))
    last = Output("a", tokens=[3], finish=FinishReason.STOP, stop_token=3, timing=Timing(1.0, finished=2.0))
    last.drafted_tokens, last.accepted_tokens = 5, 1
    queue.put(last)
    [whole] = take_all(queue, 1)
    assert whole.tokens == [1, 2, 3] and [p.logprob for p in whole.logprobs] == [-1.0, -2.0]
    assert whole.finish is FinishReason.STOP and whole.stop_token == 3 and whole.cached_tokens == 7
    assert whole.timing == Timing(1.0, finished=2.0)
    assert (whole.drafted_tokens, whole.accepted_tokens) == (9, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Output("a", 0, [1]), Output("a", 1, [2])),
        (Output("a", tokens=[1], finish=FinishReason.STOP), Output("a", tokens=[2])),
        (Output("a", tokens=[1]), Output("a", error="failed", finish=FinishReason.ERROR)),
        (Output("a", tokens=[1]), Output("a", ticket={"blocks": 1})),
        (Output("a", ticket={"blocks": 1}), Output("a", tokens=[1])),
    ],
    ids=["other choice", "after an end", "error", "ticket", "after a ticket"],
)
def test_outputs_that_are_not_merged(first: Output, second: Output) -> None:
    queue = OutputQueue(merges=True)
    queue.put(first)
    queue.put(second)
    assert take_all(queue, 2) == [first, second]


def test_outputs_are_not_merged_by_default() -> None:
    queue = OutputQueue(merges=False)
    queue.put(Output("a", tokens=[1]))
    queue.put(Output("a", tokens=[2]))
    assert [output.tokens for output in take_all(queue, 2)] == [[1], [2]]


def test_reader_that_waits_gets_each_output() -> None:
    async def run() -> list[list[int]]:
        queue, seen = OutputQueue(merges=True), []
        for token in range(3):
            waiting = asyncio.create_task(queue.get())
            await asyncio.sleep(0)
            queue.put(Output("a", tokens=[token]))
            item = await asyncio.wait_for(waiting, 10)
            assert isinstance(item, Output)
            seen.append(item.tokens)
        return seen

    assert asyncio.run(run()) == [[0], [1], [2]]


def test_error_follows_earlier_outputs() -> None:
    async def run() -> None:
        queue = OutputQueue(merges=True)
        queue.put(Output("a", tokens=[1]))
        queue.put(error := EngineFailed("died"))
        assert await queue.get() == Output("a", tokens=[1])
        assert await queue.get() is error

    asyncio.run(run())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_tokens_of_each_choice_keep_their_order(steps: list[tuple[int, bool]]) -> None:
    async def run() -> None:
        queue = OutputQueue(merges=True)
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        made: dict[int, list[int]] = {0: [], 1: [], 2: []}

        async def take() -> None:
            item = await asyncio.wait_for(queue.get(), 10)
            assert isinstance(item, Output)
            seen[item.index] += item.tokens

        for token, (index, read) in enumerate(steps):
            queue.put(Output("a", index, [token]))
            made[index].append(token)
            if read:
                await take()
        while sum(map(len, seen.values())) < len(steps):
            await take()
        assert seen == made

    asyncio.run(run())


def test_compact_outputs_keep_their_order() -> None:
    timing = Timing(0.0, 1.0, 2.0, None)
    outputs = [
        Output("a", 0, [1], timing=timing),
        Output("a", 0, [2]),
        Output("b", 1, [3], drafted_tokens=4, accepted_tokens=2),
        Output("b", 1, [4], [TokenLogprob(-1.0, 1)]),
        Output("a", 0, [5], finish=FinishReason.LENGTH),
        Output("c", ticket={"of": "c"}),
    ]
    short = compact_outputs(outputs)
    assert [isinstance(each, tuple) for each in short] == [False, True, True, False, False, False]
    [message] = EngineMessageDecoder().feed(encode_message(EngineUpdate("m", short, Stats())))
    assert isinstance(message, EngineUpdate) and message.outputs == short
    assert message.outputs[2] == ("b", 1, [3], 4, 2)


def test_tokens_are_appended_only_to_an_open_output() -> None:
    async def run() -> list[Output]:
        queue = OutputQueue(merges=True)
        queue.put_tokens("a", 0, [1], 4, 0)
        queue.put_tokens("a", 0, [2], 3, 1)
        queue.put_tokens("a", 1, [3])
        queue.put(Output("a", 1, [4], finish=FinishReason.STOP))
        queue.put_tokens("a", 1, [5])
        return [item for _ in range(3) if isinstance(item := await queue.get(), Output)]

    found = [(o.index, o.tokens, o.drafted_tokens, o.accepted_tokens) for o in asyncio.run(run())]
    assert found == [(0, [1, 2], 7, 1), (1, [3, 4], 0, 0), (1, [5], 0, 0)]
