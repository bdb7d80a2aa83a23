"""Layers with a window, in steps that are planned while others run: every token finds the keys that it attends to."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.engine_config import SchedulerConfig, SpeculationConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import PENDING_TOKEN, StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.kv.layer_groups import LayerGroups

SIZE, VOCAB = 8, 3  # so few tokens that drafts are often right


class WindowedRunner(FakePipelinedRunner):
    """Also writes the tokens to the blocks of windows, and checks there what each token attends to."""

    def __init__(self, num_blocks: int, windows: list[int]) -> None:
        super().__init__(num_blocks, SIZE, VOCAB)
        self.groups = LayerGroups(1, (0, *windows), ())
        self._content: dict[tuple[int, int], tuple[int, int]] = {}  # group and token, by block and offset in it

    def run(self, plan: StepPlan) -> StepResult:
        newest = dict(self._newest_tokens)
        for work in plan.work:
            assert len(work.window_blocks) == len(self.groups.windows) - 1
            for group, table in enumerate((work.blocks, *work.window_blocks)):
                for position, token in enumerate(work.tokens, work.start):
                    known = newest[work.id] if token == PENDING_TOKEN else token
                    self._content[table[position // SIZE], position % SIZE] = group, known
        for work in plan.work:
            for group, (window, table) in enumerate(zip(self.groups.windows[1:], work.window_blocks, strict=True), 1):
                for key in range(max(0, work.start - window + 1), work.start + len(work.tokens)):
                    block, offset = divmod(key, SIZE)
                    token = self._content[work.blocks[block], offset][1]
                    assert self._content[table[block], offset] == (group, token), (work.id, group, key)
        return super().run(plan)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    spare=st.integers(0, 40),
    windows=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    budget=st.sampled_from([16, 40]),
    drafts=st.booleans(),
)
def test_every_token_finds_its_keys(seed: int, spare: int, windows: list[int], budget: int, drafts: bool) -> None:
    rng = random.Random(seed)
    config = SchedulerConfig(block_size=SIZE, max_batch_tokens=budget, max_running=6, max_context=128)
    runner = WindowedRunner(12 + 4 * (1 + len(windows)) + spare, windows)
    drafter = make_drafter(SpeculationConfig("ngram", 3), lambda: None) if drafts else None
    engine = Engine(config, runner, drafter=drafter)
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    for number in range(8):
        length, new = rng.randint(1, 70), rng.randint(1, 30)
        prompt = (shared + [rng.randrange(VOCAB) for _ in range(10)])[-length:] if number % 2 else shared[:length]
        if length + new <= engine.max_context:
            params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, n=rng.choice([1, 1, 2]))
            engine.add(Submission(f"r{number}", prompt, params))
        for _ in range(rng.randint(0, 4)):
            engine.step()
            engine.kv.check_invariants()
    for _ in range(2000):
        if engine.idle:
            break
        engine.step()
        engine.kv.check_invariants()
    assert engine.idle
    assert engine.kv.num_free_blocks + engine.kv.num_cached_blocks == runner.num_blocks


@settings(max_examples=40, deadline=None)
@given(blocks=st.integers(10, 150), windows=st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_the_longest_request_runs_alone(blocks: int, windows: list[int]) -> None:
    """While a step runs, the next one is planned: the request then holds the blocks of both."""
    config = SchedulerConfig(block_size=SIZE, max_batch_tokens=64, max_running=2, max_context=1000)
    engine = Engine(config, WindowedRunner(blocks, windows))
    prompt = [i % VOCAB for i in range(engine.max_context - 1)]
    engine.add(Submission("longest", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
    for _ in range(100):
        engine.step()
    assert engine.idle and not engine.scheduler.preemptions
