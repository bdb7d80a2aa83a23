"""FakeRunner: a Runner without a model, for tests.

It stores the tokens themselves as keys and values, and samples a hash of the tokens that it finds through the
request's block table. So a wrong block table, a lost write or a stale block changes the output."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

from emberline.core.plan import PENDING_TOKEN, Admission, SampledToken, StepPlan, StepResult, TokenLogprob, WorkItem
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.region import HostRegion


class FakeRunner:
    def __init__(
        self, num_blocks: int = 64, block_size: int = 16, vocab_size: int = 1000, eos: frozenset[int] = frozenset()
    ) -> None:
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.eos = eos
        self.layout = "fake"
        self.steps = 0
        self.block_bytes = 8 * block_size
        self._block_size = block_size
        self._memory = array("q", [-1]) * (num_blocks * block_size)
        self._admissions: dict[str, Admission] = {}
        self._newest_tokens: dict[str, int] = {}  # last sampled token of each request

    def run(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        for save in plan.saves:
            save.buffer[: self.block_bytes] = self._memory[self._slots_of_block(save.block)].tobytes()
        for load in plan.loads:
            self._memory[self._slots_of_block(load.block)] = array("q", load.buffer[: self.block_bytes].tobytes())
        for admission in plan.admitted:
            assert admission.id not in self._admissions
            self._admissions[admission.id] = admission
        for work in plan.work:
            for offset, token in enumerate(work.tokens):
                block, slot = divmod(work.start + offset, self._block_size)
                at = work.blocks[block] * self._block_size + slot
                self._memory[at] = self._newest_tokens[work.id] if token == PENDING_TOKEN else token
        sampled = {work.id: self._sample_tokens(work) for work in plan.work if work.samples}
        self._newest_tokens.update((name, [one, *one.further][-1].token) for name, one in sampled.items())
        logprobs = {work.id: self._logprobs(work) for work in plan.work if work.prompt_logprobs}
        for ended in plan.ended_ids:
            del self._admissions[ended]
            self._newest_tokens.pop(ended, None)
        return StepResult(plan.step, sampled, logprobs)

    def region(self) -> HostRegion:
        """Return the memory of the fake KV cache as a Region, which KV transfers can read and write."""
        layout = KVLayout(self.layout, layers=1, parts=1, heads=1, tokens=self._block_size, width=8, dtype="int64")
        return HostRegion(layout, [memoryview(self._memory)])

    def _slots_of_block(self, block_id: int) -> slice:
        return slice(block_id * self._block_size, (block_id + 1) * self._block_size)

    def _sample_tokens(self, work: WorkItem) -> SampledToken:
        """Return the next token, and with it one more for each drafted token that equals the sampled one."""
        first = work.start + len(work.tokens) - work.num_draft
        sampled = [SampledToken(self._sample_token(work, first))]
        for drafted in work.tokens[len(work.tokens) - work.num_draft :]:
            if sampled[-1].token != drafted:
                break
            sampled.append(SampledToken(self._sample_token(work, first + len(sampled))))
        return SampledToken(sampled[0].token, further=sampled[1:])

    def _sample_token(self, work: WorkItem, length: int) -> int:
        """Return the token that follows the first `length` tokens of a request."""
        admission, size = self._admissions[work.id], self._block_size
        seed = 0 if admission.params.greedy else admission.seed
        digest = blake2b(f"{seed}:".encode(), digest_size=8)
        with memoryview(self._memory) as memory:
            for i, block in enumerate(work.blocks[: -(-length // size)]):
                digest.update(memory[block * size : block * size + min(size, length - i * size)])
        return int.from_bytes(digest.digest(), "little") % self.vocab_size

    def _logprobs(self, work: WorkItem) -> list[TokenLogprob]:
        tokens = self._admissions[work.id].tokens
        successors = tokens[work.start + 1 : work.start + 1 + len(work.tokens)]
        return [TokenLogprob(logprob=-float(token), rank=1) for token in successors]


class FakePipelinedRunner(FakeRunner):
    """A FakeRunner with `launch`, which returns the result only when the returned function is called."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.run(plan)
        return lambda: result
