"""The effect of each sampling setting on the sampled token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emberline.core.params import SamplingParams
from emberline.core.plan import Admission, SampledToken, WorkItem
from emberline.engine.sampler import Sampler, SamplingStateFactory

VOCAB = 64
EOS = frozenset({2})


def sample(
    params: SamplingParams,
    logits: torch.Tensor,
    tokens: list[int] | None = None,
    prompt_len: int | None = None,
    seed: int = 1,
) -> SampledToken:
    sampler = Sampler(VOCAB, SamplingStateFactory(EOS, None))
    tokens = tokens or [5]
    assert sampler.admit(Admission("a", tokens, prompt_len or len(tokens), params, seed)) is None
    sampled, failed = sampler.sample([WorkItem("a", 0, tokens, [0], samples=True)], logits.clone()[None])
    assert not failed
    return sampled["a"]


def ladder() -> torch.Tensor:
    """Return logits in which token i is the (i + 1)-th most probable."""
    return torch.linspace(5, -5, VOCAB)


def test_greedy_takes_the_most_probable_and_the_lowest_id_of_ties() -> None:
    assert sample(SamplingParams(temperature=0.0), ladder()).token == 0
    assert sample(SamplingParams(temperature=0.0), torch.zeros(VOCAB)).token == 0


@pytest.mark.parametrize(
    ("settings", "reachable"),
    [({"top_k": 3}, {0, 1, 2}), ({"top_k": 1}, {0}), ({"top_p": 0.01}, {0}), ({"min_p": 0.8}, {0, 1})],
)
def test_filters_limit_the_sampled_tokens(settings: dict[str, float], reachable: set[int]) -> None:
    params = SamplingParams(temperature=1.0, **settings)  # type: ignore[arg-type]
    drawn = {sample(params, ladder(), seed=seed).token for seed in range(200)}
    assert drawn == reachable


def test_samples_follow_the_distribution() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[:3] = torch.tensor([0.6, 0.3, 0.1]).log()
    drawn = np.bincount([sample(SamplingParams(), logits, seed=s).token for s in range(3000)], minlength=3) / 3000
    assert np.abs(drawn[:3] - [0.6, 0.3, 0.1]).max() < 0.03


def test_seed_and_position_determine_the_token() -> None:
    logits = torch.zeros(VOCAB)
    first = [sample(SamplingParams(), logits, seed=9).token for _ in range(3)]
    assert len(set(first)) == 1
    assert len({sample(SamplingParams(), logits, [5] * n, seed=9).token for n in range(1, 20)}) > 5


def test_repetition_penalty_counts_the_prompt_and_others_do_not() -> None:
    logits = torch.zeros(VOCAB)
    logits[7], logits[8] = 1.0, 0.9
    greedy = {"temperature": 0.0}
    assert sample(SamplingParams(**greedy, repetition_penalty=2.0), logits, [7], 1).token == 8
    assert sample(SamplingParams(**greedy, presence_penalty=0.5), logits, [7], 1).token == 7
    assert sample(SamplingParams(**greedy, presence_penalty=0.5), logits, [3, 7], 1).token == 8
    assert sample(SamplingParams(**greedy, frequency_penalty=0.06), logits, [3, 7], 1).token == 7
    assert sample(SamplingParams(**greedy, frequency_penalty=0.06), logits, [3, 7, 7], 1).token == 8


def test_logit_bias_and_min_tokens() -> None:
    assert sample(SamplingParams(temperature=0.0, logit_bias={40: 100.0}), ladder()).token == 40
    logits = torch.zeros(VOCAB)
    logits[2] = 9.0
    assert sample(SamplingParams(temperature=0.0), logits).token == 2
    assert sample(SamplingParams(temperature=0.0, min_tokens=3), logits, [5, 6], 1).token != 2
    assert sample(SamplingParams(temperature=0.0, min_tokens=3), logits, [5, 6, 7, 8], 1).token == 2
    logits[9] = 8.0
    assert sample(SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9,)), logits).token not in (2, 9)


def test_logprobs_are_those_before_penalties() -> None:
    got = sample(SamplingParams(temperature=0.0, logit_bias={40: 100.0}, logprobs=3), ladder())
    assert got.logprob is not None and got.token == 40
    expected = ladder().log_softmax(-1)
    assert got.logprob.logprob == pytest.approx(float(expected[40]), abs=1e-5)
    assert got.logprob.rank == 41
    assert [token for token, _ in got.logprob.top] == [0, 1, 2]
    assert [p for _, p in got.logprob.top] == pytest.approx(expected[:3].tolist(), abs=1e-5)
