"""Sampling and log-probabilities on the GPU match their float64 definition, and are the same in any batch and run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from emberline.kernels.cuda.sample import apply_bitmask, apply_penalties, count_tokens, edit_logits, log_probs, sample
from emberline.kernels.reference import IN_PROMPT_BIT, MAX_TOKEN_COUNT, ReferenceBackend, uniform_from_seed
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB = 128256
VOCABS = (7, 1000, 2049, 6001, 50257, VOCAB)  # fewer than threads, than a list; rows not aligned to 16 bytes
NEAR = 1e-6  # a number this close to a boundary may be on either side of it

REFERENCE = ReferenceBackend()
Settings = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random_mask(rows: int, share: float) -> Tensor:
    return torch.rand(rows) < share


def mixed_settings(rows: int) -> Settings:
    temperature = torch.rand(rows) * 2
    for value, share in ((0.0, 0.1), (50.0, 0.1), (1e-4, 0.05), (1e-40, 0.02)):
        temperature[random_mask(rows, share)] = value
    top_k = torch.randint(1, 100, (rows,)).masked_fill(random_mask(rows, 0.5), 0).int()
    for count, share in ((1500, 0.1), (700, 0.05), (1, 0.03), (1 << 30, 0.02)):
        top_k[random_mask(rows, share)] = count
    top_p = (torch.rand(rows) + 0.3).clamp(max=1)
    min_p = torch.rand(rows).mul(0.3).masked_fill(random_mask(rows, 0.6), 0)
    return temperature, top_k, top_p, min_p, *seeds_and_positions(rows)


def uniform_settings(rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Settings:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value)

    return full(temperature), full(top_k).int(), full(top_p), full(min_p), *seeds_and_positions(rows)


def seeds_and_positions(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-(1 << 63), (1 << 63) - 1, (rows,)), torch.randint(0, 1 << 20, (rows,)).int()


def to_arguments(settings: Sequence[Tensor]) -> tuple[SamplingTensors, Tensor, Tensor]:
    """Return the settings, seeds and positions as `sample` takes them."""
    return SamplingTensors(*settings[:4]), settings[4], settings[5]


def sample_on_gpu(logits: Tensor, settings: Settings, *, pdl: bool = True) -> Tensor:
    out = torch.full((len(logits),), -1, device="cuda")
    return sample(logits.cuda(), *to_arguments([s.cuda() for s in settings]), out, pdl=pdl).cpu()


def sample_by_definition(logits: Tensor, settings: Settings) -> Tensor:
    return REFERENCE.sample(logits.clone(), SamplingTensors(*settings[:4]), uniform_from_seed(*settings[4:]))


def assert_agrees(logits: Tensor, settings: Settings, *, most_off: float = 0.02) -> None:
    """Assert that ids match the definition, except in few rows that are within rounding of a boundary."""
    got, wanted = sample_on_gpu(logits, settings), sample_by_definition(logits, settings)
    off = (got != wanted).nonzero().flatten().tolist()
    for i in off:
        assert is_near(logits[i], [s[i : i + 1] for s in settings], int(got[i])), (i, [s[i].item() for s in settings])
    assert len(off) <= 1 + most_off * len(logits), f"{len(off)} of {len(logits)} rows are off by a boundary"


def is_near(logits: Tensor, settings: list[Tensor], got: int) -> bool:
    order = logits.double().sort(descending=True, stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    temperature, top_k, top_p, min_p = settings[:4]
    uniform = uniform_from_seed(*settings[4:])
    around = []
    for a, b, c in product((-NEAR, 0.0, NEAR), repeat=3):
        share = torch.where(top_p < 1, top_p * (1 + a), top_p)
        u = (uniform + c).clamp(0, 1 - 2.0**-53)
        near = SamplingTensors(temperature, top_k, share, min_p * (1 + b))
        around.append(int(place[REFERENCE.sample(logits[None], near, u)]))
    return min(around) <= int(place[got]) <= max(around)


def peaked(rows: int, vocab: int) -> Tensor:
    """Return logits like a model's: most of the mass is on few tokens at random ids."""
    return torch.randn(rows, vocab) * torch.rand(rows, 1) * 8


@pytest.mark.parametrize("vocab", VOCABS)
def test_sample_agrees_with_its_definition(vocab: int) -> None:
    rows = 96
    logits = peaked(rows, vocab)
    logits[::7, 5 : vocab - vocab // 10] = -torch.inf
    logits[::5] = logits[::5].round()  # many ties
    logits[3] = logits[3].bfloat16().float()
    assert_agrees(logits, mixed_settings(rows))


@pytest.mark.parametrize(
    "one",
    [(1.0, 0, 0.9, 0.0), (100.0, 0, 1.0, 0.0), (100.0, 0, 0.5, 0.9), (1.0, 50, 0.9, 0.0), (30.0, 30000, 0.9, 0.0)],
)
def test_flat_rows(one: tuple[float, int, float, float]) -> None:
    """No short list contains the result, so the search covers the whole row."""
    rows = 24
    assert_agrees(torch.randn(rows, VOCAB), uniform_settings(rows, *one), most_off=0.1)
    assert_agrees(torch.randn(rows, VOCAB).bfloat16().float(), uniform_settings(rows, *one), most_off=0.1)


@pytest.mark.parametrize("one", [(1.0, 0, 0.9, 0.0), (1.0, 50, 0.9, 0.1), (1.0, 50, 0.9, 0.0), (1.0, 700, 0.9, 0.05)])
def test_adjacent_likely_tokens_overflow_the_list(one: tuple[float, int, float, float]) -> None:
    """A few threads hold all likely tokens, so that the list overflows."""
    logits = torch.randn(8, VOCAB)
    logits[:, torch.arange(VOCAB) // 4 % 1024 < 30] += 20
    assert_agrees(logits, uniform_settings(8, *one))


def test_equal_logits_reveal_the_uniform_number() -> None:
    rows, vocab = 64, 1 << 19
    settings = uniform_settings(rows, 0.7)
    got = sample_on_gpu(torch.zeros(1, vocab).cuda().expand(rows, vocab), settings)
    assert torch.equal(got, (uniform_from_seed(*settings[4:]) * vocab).long())
    signed = torch.zeros(rows, 5000)
    signed[:, ::2] = -0.0
    assert_agrees(signed, uniform_settings(rows, 0.7, 0, 0.9))
    assert_agrees(signed, uniform_settings(rows, 0.7, 3))


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy(vocab: int) -> None:
    logits = peaked(65, vocab)
    logits[::3] = logits[::3].round().clamp(max=1)  # many ties: the lowest id is expected
    assert torch.equal(sample_on_gpu(logits, uniform_settings(65, 0.0, 5, 0.5)), logits.argmax(-1))


def test_rows_with_nan_and_inf() -> None:
    for vocab in (50, 5001):
        logits = torch.stack([torch.full((vocab,), x) for x in (torch.nan, -torch.inf, torch.inf, 0.0, -torch.inf)])
        logits[2, :3] = 0.0
        logits[3, 7] = torch.nan
        logits[4, 9] = -3e38
        for temperature in (0.0, 1.0):
            got = sample_on_gpu(logits, uniform_settings(5, temperature, 0, 0.9))
            assert got[:3].tolist() == [0, 0, 3] and got[4] == 9
            assert 0 <= got[3] < vocab and got[3] != 7


def test_masked_tokens_are_never_sampled() -> None:
    rows = 256
    logits = torch.full((rows, VOCAB), -torch.inf)
    allowed = torch.randint(VOCAB, (rows, 3))
    logits.scatter_(1, allowed, torch.randn(rows, 3))
    for top_k in (0, 50):
        assert (sample_on_gpu(logits, uniform_settings(rows, 5.0, top_k))[:, None] == allowed).any(1).all()


@pytest.mark.parametrize("vocab", [12, 9000])
def test_draws_follow_the_distribution(vocab: int) -> None:
    draws, kinds = 40_000, 12
    one = torch.full((vocab,), -60.0)
    places = torch.randperm(vocab)[:kinds]
    one[places] = torch.linspace(0, -3, kinds)
    settings = uniform_settings(draws, 1.3)
    settings[4].copy_(torch.arange(draws))
    got = sample_on_gpu(one.cuda().expand(draws, vocab), settings)
    seen = got.bincount(minlength=vocab)[places].double()
    expected = draws * (one[places].double() / 1.3).softmax(0)
    chi_square = ((seen - expected).square() / expected).sum().item()
    assert seen.sum() == draws
    assert 1.0 < chi_square < 31.3, (
        chi_square
    )  # 11 degrees of freedom: outside with probability 0.001 (above) and 5e-5 (below)


@pytest.mark.parametrize("vocab", [1000, 50257])
def test_row_is_independent_of_the_batch(vocab: int) -> None:
    rows = 96
    logits, settings = peaked(rows, vocab), mixed_settings(rows)
    whole = sample_on_gpu(logits, settings)
    assert torch.equal(whole, sample_on_gpu(logits, settings, pdl=False))
    order = torch.randperm(rows)
    assert torch.equal(whole[order], sample_on_gpu(logits[order], tuple(s[order] for s in settings)))  # type: ignore[arg-type]
    for i in range(0, rows, 7):
        assert sample_on_gpu(logits[i : i + 1], tuple(s[i : i + 1] for s in settings)) == whole[i]  # type: ignore[arg-type]
    wide = torch.full((rows, vocab + 3), torch.nan)
    wide[:, :vocab] = logits
    assert torch.equal(whole, sample_on_gpu(wide.cuda()[:, :vocab], settings))


@pytest.mark.parametrize(("vocab", "top_n"), [(20, 20), (77, 5), (5001, 20), (5001, 0), (VOCAB, 20), (VOCAB, 1)])
def test_log_probs(vocab: int, top_n: int) -> None:
    logits, ids = torch.randn(9, vocab) * 4, torch.randint(vocab, (9,))
    logits[2] = logits[2].round()
    logits[3] = 1.5
    if vocab > 1000:
        logits[4, 10:] = -torch.inf  # fewer tokens than top_n
        logits[5, torch.arange(vocab) // 4 % 1024 < 20] += 30
        ids[4] = 3
    got = [x.cpu() for x in log_probs(logits.cuda(), ids.cuda(), top_n, out=poisoned(9, top_n))]
    chosen, top_ids, top, rank = REFERENCE.log_probs(logits, ids, top_n)
    assert torch.equal(got[1], top_ids) and torch.equal(got[3], rank)
    exact = logits.double().log_softmax(-1)
    torchs = (logits.cuda().log_softmax(-1).cpu().double() - exact).nan_to_num(0).abs().max().item()
    for mine, wanted in ((got[0], chosen), (got[2], top)):
        assert torch.equal(mine.isinf(), wanted.isinf())
        off = (mine.double() - wanted.double())[~wanted.isinf()].abs()
        assert not off.isnan().any() and (off <= 2 * torchs + 1e-6).all(), f"off by {off.max():.2e}, torch {torchs:.2e}"


def poisoned(rows: int, top_n: int) -> LogProbs:
    values = [torch.full(shape, torch.nan, device="cuda") for shape in ((rows,), (rows, top_n))]
    whole = [torch.full(shape, -7, device="cuda") for shape in ((rows, top_n), (rows,))]
    return LogProbs(values[0], whole[0], values[1], whole[1])


@pytest.mark.parametrize("vocab", [77, 50257, VOCAB])
def test_bitmask(vocab: int) -> None:
    logits = torch.randn(4, vocab)
    mask = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab // 32))).int()
    rows, mine, theirs = torch.tensor([3, 1]), logits.cuda(), logits.clone()
    apply_bitmask(mine, mask.cuda(), rows.cuda())
    REFERENCE.apply_bitmask(theirs, mask, rows)
    assert torch.equal(mine.cpu(), theirs) and theirs.isinf().any()


def test_edit_logits() -> None:
    logits, count = torch.randn(5, 1001), 700
    places = torch.randperm(5 * 1001)[:count]
    rows, ids = (places // 1001).int(), (places % 1001).int()
    divide, add = torch.rand(count) + 0.5, torch.randn(count)
    add[::9] = -torch.inf
    theirs = logits.clone()
    REFERENCE.edit_logits(theirs, rows, ids, divide, add)
    assert not torch.equal(theirs, logits)
    mine, padding = logits.cuda(), torch.full((37,), -1, dtype=torch.int32)
    ones = torch.ones(37)
    padded = (torch.cat(pair).cuda() for pair in ((rows, padding), (ids, padding), (divide, ones), (add, ones)))
    edit_logits(mine, *padded)
    assert torch.equal(mine.cpu(), theirs)


def test_empty_inputs() -> None:
    empty, none = torch.empty(0, 50, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    assert len(sample(empty, *to_arguments([s.cuda() for s in uniform_settings(0, 1.0)]), none)) == 0
    assert log_probs(empty, none, 3)[1].shape == (0, 3)
    apply_bitmask(empty, torch.empty(0, 2, dtype=torch.int32, device="cuda"), none)
    edit_logits(empty, none.int(), none.int(), none.float(), none.float())


def test_cuda_graph_capture() -> None:
    rows = 48
    logits, first = peaked(rows, VOCAB).cuda(), [s.cuda() for s in mixed_settings(rows)]
    work, out, scores = torch.empty_like(logits), torch.empty(rows, dtype=torch.int64, device="cuda"), poisoned(rows, 5)
    mask = torch.randint(-(1 << 31), 1 << 31, (rows, VOCAB // 32)).int().cuda()
    places = torch.arange(rows, device="cuda")
    edits = (
        places.int(),
        places.int(),
        torch.full((rows,), 1.5, device="cuda"),
        torch.ones(rows, device="cuda"),
    )

    def step() -> None:
        work.copy_(logits)
        edit_logits(work, *edits)
        apply_bitmask(work, mask, places)
        sample(work, *to_arguments(first), out)
        log_probs(work, out, 5, out=scores)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        logits.copy_(peaked(rows, VOCAB))
        for buffer, fresh in zip(first, mixed_settings(rows), strict=True):
            buffer.copy_(fresh)
        graph.replay()
        replayed = [x.clone() for x in (out, *scores)]
        for x in (out, *scores):
            x.fill_(-5)
        step()
        assert all(torch.equal(a, b) for a, b in zip(replayed, (out, *scores), strict=True))
        assert (work.gather(1, out[:, None]) > -torch.inf).all() and (scores[3] >= 1).all()


@pytest.mark.parametrize("vocab", VOCABS)
def test_penalties_and_counts(vocab: int) -> None:
    """Results equal the definition bitwise, also if the vocabulary is not a multiple of a thread's tokens."""
    rows, slots = torch.tensor([0, 2, 3]).int(), torch.tensor([4, 1, 0]).int()
    counts = torch.zeros(5, -(-vocab // 8) * 8, dtype=torch.int16)
    counts[:, :vocab] = torch.randint(0, 5, (5, vocab)).mul(random_mask(vocab, 0.2)).short()
    counts[:, :vocab][random_mask(5 * vocab, 0.1).view(5, vocab)] += IN_PROMPT_BIT
    counts[4, vocab - 1] = MAX_TOKEN_COUNT
    settings = torch.tensor([[1.3, 0.2, 0.5], [0.7, -0.1, 0.0], [1.0, 0.3, -1.0]])
    logits, device = peaked(4, vocab), [counts.cuda(), slots.cuda(), rows.cuda()]
    logits[2, : vocab // 2] = -torch.inf
    sample_on_gpu = logits.cuda()
    for _ in range(3):
        REFERENCE.apply_penalties(logits, rows, slots, settings, counts)
        apply_penalties(sample_on_gpu, device[2], device[1], settings.cuda(), device[0])
        assert torch.equal(sample_on_gpu.cpu(), logits)
        tokens = torch.tensor([vocab - 1, 3, 5, 0])
        REFERENCE.count_tokens(counts, slots, rows, tokens)
        count_tokens(*device, tokens.cuda())
        assert torch.equal(device[0].cpu(), counts)
