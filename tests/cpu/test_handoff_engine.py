"""A request that moves between engines, with its blocks or with its tokens alone, gives the same tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.boot import boot
from emberline.engine.engine import Engine

PROMPT = [(31 * i) % 250 + 2 for i in range(75)]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -4.0}},
    "minimum": {"seed": 1, "min_tokens": 5, "max_tokens": 9, "stop_token_ids": tuple(range(100))},
    "regex": {"temperature": 0.0, "grammar": GrammarSpec("regex", "[a-f]{4}x[0-9]{1,20}")},
    "choice": {"seed": 2, "grammar": GrammarSpec("choice", json.dumps(["yes", "no", "never"]))},
    "single": {"temperature": 0.0, "grammar": GrammarSpec("choice", json.dumps(["y"]))},
    "scored": {"temperature": 0.0, "logprobs": 2},
    "short": {"temperature": 0.0, "max_tokens": 1},
    "prompt-scored": {"temperature": 0.0, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, max_position_embeddings=256)
    directory = tiny.write(tmp_path_factory.mktemp("model"), config)
    tokenizer_file(directory)
    return directory


def start_engine(checkpoint: Path, name: str | None = None, block: int = 8, **others: Any) -> Engine:
    transfer = TransferConfig(name) if name else None
    settings = {"max_batch_tokens": 32, "max_running": 8, "kv_memory": 1 << 20, **others}
    return boot(
        EngineConfig.build(str(checkpoint), device="cpu", block_size=block, transfer=transfer, **settings)
    ).engine


@dataclass
class Reply:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    scores: list[Any] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None

    def take(self, output: Output) -> None:
        assert self.finish is None, "it has ended"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.scores = output.prompt_logprobs or self.scores
        self.finish, self.stop_token = output.finish, output.stop_token
        assert output.error is None


def run(e: Engine, submission: Submission, background: Engine | None = None) -> Reply:
    e.add(submission)
    return run_until_idle(e, background)


def run_until_idle(e: Engine, background: Engine | None = None) -> Reply:
    reply, ends = Reply(), time.monotonic() + 30
    while not e.idle:
        assert time.monotonic() < ends
        for output in e.step():
            reply.take(output)
        if background is not None:
            background.step()
    e.kv.check_invariants()
    return reply


def make_submission(changes: dict[str, Any], prompt: list[int] = PROMPT) -> Submission:
    return Submission(f"r{time.monotonic_ns()}", prompt, SamplingParams(**{"max_tokens": 8, **changes}), timeout=60.0)


def first_ticket(p: Engine, submission: Submission) -> dict[str, Any]:
    """Return the first ticket, while the prompt is still being computed."""
    p.add(replace(submission, publish=True))
    while not (outputs := p.step()):
        pass
    assert outputs[0].ticket is not None and outputs[0].finish is None
    return outputs[0].ticket


def limit_to_transport(transport: str, ticket: dict[str, Any]) -> dict[str, Any]:
    endpoints = {transport: ticket["peer"]["endpoints"][transport]}
    return {**ticket, "peer": {**ticket["peer"], "endpoints": endpoints}}


def wait_until_freed(*engines: Engine) -> None:
    ends = time.monotonic() + 30
    while any(e.kv.num_free_blocks + e.kv.num_cached_blocks < e.kv.num_blocks for e in engines):
        assert time.monotonic() < ends, "blocks are still in use"
        for e in engines:
            e.step()
            e.kv.check_invariants()
        time.sleep(0.002)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Reply]:
    """Return the outputs of an engine without peers and with an empty cache."""
    return {
        name: run(start_engine(checkpoint, prefix_cache=False), make_submission(changes))
        for name, changes in PARAMS.items()
    }


@pytest.fixture(scope="module")
def engines_by_name(checkpoint: Path) -> Iterator[dict[str, Engine]]:
    started = {
        name: start_engine(checkpoint, name, block) for name, block in (("p8", 8), ("p32", 32), ("d8", 8), ("d16", 16))
    }
    yield started
    for one in started.values():
        one.close()


@pytest.mark.parametrize("wish", PARAMS)
@pytest.mark.parametrize(("p", "d", "transport"), [("p8", "d8", "shm"), ("p8", "d16", "tcp"), ("p32", "d16", "shm")])
def test_prefill_and_decode_on_two_engines_give_the_same_tokens(
    engines_by_name: dict[str, Engine], expected: dict[str, Reply], wish: str, p: str, d: str, transport: str
) -> None:
    sender, receiver = engines_by_name[p], engines_by_name[d]
    salt = f"{wish} {p} {d} {transport}"  # no engine has cached it
    submission = replace(make_submission(PARAMS[wish]), salt=salt)
    if wish == "prompt-scored":
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            sender.add(replace(submission, publish=True))
        return
    ticket = limit_to_transport(transport, first_ticket(sender, submission))
    before = receiver.stats()
    reply = run(receiver, replace(submission, source=ticket), background=sender)
    assert reply == expected[wish]
    after = receiver.stats()
    size = sender.config.block_size
    assert before.transfer is not None and after.transfer is not None
    assert after.transfer.hit_tokens - before.transfer.hit_tokens == 75 // size * size
    assert after.prompt_tokens - before.prompt_tokens == 75 % size if wish not in ("single", "short") else True
    assert after.transfer.pull_failures == {}
    run_until_idle(sender)
    wait_until_freed(sender, receiver)


def test_cached_part_of_the_prompt_is_not_pulled(
    engines_by_name: dict[str, Engine], expected: dict[str, Reply]
) -> None:
    sender, receiver = engines_by_name["p8"], engines_by_name["d8"]
    run(receiver, replace(make_submission({"max_tokens": 1}, PROMPT[:30]), salt="part"))
    submission = replace(make_submission(PARAMS["greedy"]), salt="part")
    before = receiver.stats().transfer
    assert run(receiver, replace(submission, source=first_ticket(sender, submission)), sender) == expected["greedy"]
    after = receiver.stats().transfer
    assert before is not None and after is not None and after.hit_tokens - before.hit_tokens == 72 - 24
    run_until_idle(sender)
    wait_until_freed(sender, receiver)


@pytest.mark.parametrize("wish", PARAMS)
def test_resuming_at_every_position_gives_the_same_tokens(
    engines_by_name: dict[str, Engine], expected: dict[str, Reply], wish: str
) -> None:
    whole = expected[wish]
    for cut in range(len(whole.tokens) + 1):
        resumed_tokens = tuple(whole.tokens[:cut])
        reply = run(
            engines_by_name["d8"],
            replace(make_submission(PARAMS[wish]), resumed=(resumed_tokens,), salt=f"{wish} {cut}"),
        )
        assert [*resumed_tokens, *reply.tokens] == whole.tokens and reply.finish is whole.finish
        assert reply.logprobs == whole.logprobs[cut:]
        if cut < len(whole.tokens):
            assert reply.stop_token == whole.stop_token
        assert reply.scores == (whole.scores if cut == 0 else None)


def test_cases_cover_all_finish_reasons(expected: dict[str, Reply]) -> None:
    assert {reply.finish for reply in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert expected["choice"].stop_token is None and expected["choice"].finish is FinishReason.STOP
    assert expected["minimum"].stop_token is not None and len(expected["minimum"].tokens) >= 5
    assert len(expected["single"].tokens) == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_lost_sender_makes_the_rest_recomputed(checkpoint: Path, expected: dict[str, Reply], transport: str) -> None:
    sender, receiver = start_engine(checkpoint, "p"), start_engine(checkpoint, "d")
    submission = make_submission(PARAMS["seeded"])
    ticket = limit_to_transport(transport, first_ticket(sender, submission))
    receiver.add(replace(submission, source=ticket))
    ends = time.monotonic() + 30
    request = next(iter(receiver.scheduler.requests.values()))
    while request.num_computed < 32 and time.monotonic() < ends:
        receiver.step()
    sender.close()
    assert run_until_idle(receiver) == expected["seeded"]
    stats = receiver.stats()
    assert stats.transfer is not None and stats.transfer.hit_tokens == 32 and stats.prompt_tokens == 75 - 32
    assert stats.transfer.recomputed == 1
    wait_until_freed(receiver)
    receiver.close()


def test_abort_during_a_pull_frees_all_blocks(checkpoint: Path, expected: dict[str, Reply]) -> None:
    sender, receiver = start_engine(checkpoint, "p"), start_engine(checkpoint, "d")
    submission = make_submission(PARAMS["greedy"])
    receiver.add(replace(submission, source=limit_to_transport("tcp", first_ticket(sender, submission))))
    receiver.step()
    receiver.abort(submission.id)
    (ended,) = receiver.step()
    assert ended.finish is FinishReason.ABORT
    wait_until_freed(receiver)
    assert run(receiver, make_submission(PARAMS["greedy"])) == expected["greedy"]
    run_until_idle(sender)
    wait_until_freed(sender, receiver)
    assert sender.stats().transfer.ended == {"released": 1}  # type: ignore[union-attr]
    sender.close()
    receiver.close()


def test_invalid_transfer_settings_are_rejected(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"192\.0\.2\.1"):
        boot(EngineConfig.build(str(checkpoint), device="cpu", transfer=TransferConfig("x", listen_host="192.0.2.1")))
    with pytest.raises(InvalidRequest, match="lease"):
        TransferConfig("x", lease_seconds=0.0)
