"""Sampler: chooses tokens from logits, and keeps the sampling state of each request.

Every choice is a function of (seed, position) and the request's own logits, so a request gets the same tokens in any
batch, after preemption, and on another worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.core.plan import Admission, SampledToken, TokenLogprob, WorkItem
from emberline.engine.grammar_thread import GrammarThread
from emberline.engine.penalties import PenaltyCounts
from emberline.engine.token_rules import TokenMasker, fill_masks, make_masker
from emberline.kernels import ops
from emberline.kernels.sampling_arguments import LogProbs

if TYPE_CHECKING:  # needs llguidance, which a machine without structured output may lack
    from emberline.engine.grammar import GrammarCompiler, GrammarMatcher

GRAMMAR_TIMEOUT_S = 10.0  # for compiling a grammar that was not prepared


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to a few logits, for example for logit_bias.

    A positive logit is divided by `divide`, any other logit is multiplied by it. Then `add` is added."""

    ids: np.ndarray  # int64, each once
    divide: np.ndarray  # float32
    add: np.ndarray  # float32

    def apply(self, logits: np.ndarray) -> None:
        values = logits[self.ids]
        logits[self.ids] = np.where(values > 0, values / self.divide, values * self.divide) + self.add


class SamplingState:
    """The sampling state of one request, built from its Admission and the tokens sampled since then."""

    def __init__(self, admission: Admission, eos: frozenset[int], matcher: TokenMasker | None) -> None:
        self.params = admission.params
        self.seed = admission.seed
        self.matcher = matcher
        self.tokens = admission.tokens
        self.prompt_len = admission.prompt_len
        self._eos = eos
        p = self.params
        self._bias_ids = np.array(list(p.logit_bias), np.int64)
        self._bias = np.array(list(p.logit_bias.values()), np.float32)
        self._end_ids = np.array(sorted({*eos, *p.stop_token_ids}), np.int64)
        for token in self.tokens[self.prompt_len :]:
            self._advance_grammar(token)

    @property
    def is_plain(self) -> bool:
        """Whether the request has no penalties, biases, masks or log-probabilities."""
        p = self.params
        is_special = (
            p.has_penalties or p.logit_bias or p.min_tokens or self.matcher is not None or p.logprobs is not None
        )
        return not is_special

    def logit_edits(self, num_known: int) -> LogitEdits | None:
        """Return the changes for logit_bias and min_tokens for the token at position `num_known`.

        Penalties are not included, because they are applied earlier."""
        is_short = num_known - self.prompt_len < self.params.min_tokens
        if not (is_short or len(self._bias_ids)):
            return None
        forbidden = self._end_ids if is_short else np.zeros(0, np.int64)
        ids = np.unique(np.concatenate([self._bias_ids, forbidden]))
        divide, add = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
        add[np.searchsorted(ids, self._bias_ids)] += self._bias
        add[np.searchsorted(ids, forbidden)] = -np.inf
        return LogitEdits(ids, divide, add)

    def append_token(self, token: int) -> None:
        self.tokens.append(token)
        self._advance_grammar(token)

    @property
    def reads_tokens(self) -> bool:
        """Whether the host must know each token before the next one is sampled, for a mask or a penalty."""
        return self.matcher is not None or self.params.has_penalties

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows no further token."""
        return self.matcher is not None and self.matcher.is_complete

    def forced_tokens(self) -> list[int]:
        """Return the tokens that the grammar forces next, as far as they can be predicted."""
        return self.matcher.forced_tokens() if self.matcher is not None and not self.is_complete else []

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further, such as a limit that was reached; None if it can."""
        return self.matcher.error if self.matcher is not None else None

    def masker_after(self, masker: TokenMasker, token: int) -> TokenMasker | None:
        """Return a copy of the request's masker after one more token; None if the token is forbidden."""
        following = masker.fork()
        return following if token in self._eos or following.accept(token) else None

    def _advance_grammar(self, token: int) -> None:
        if self.matcher is not None and token not in self._eos:
            self.matcher.accept(token)


class SamplingStateFactory:
    """Builds the SamplingState of a request. Raises InvalidRequest if the request cannot be sampled.

    Call `prepare` before, to avoid waiting for a grammar to be compiled."""

    def __init__(self, eos: frozenset[int], make_compiler: Callable[[], GrammarCompiler] | None) -> None:
        self._eos = eos
        self._grammars = None if make_compiler is None else GrammarThread(make_compiler)

    def __call__(self, admission: Admission) -> SamplingState:
        params = admission.params
        return SamplingState(admission, self._eos, make_masker(params, self._make_matcher(params.grammar)))

    def prepare(self, grammar: GrammarSpec) -> Future[GrammarMatcher]:
        """Compile a grammar in a second thread. The result stays cached as long as the returned future exists."""
        if self._grammars is None:
            raise InvalidRequest(
                "grammars are not supported: the engine has no tokenizer",
                param="grammar",
                hint="use a model with a tokenizer.json",
            )
        return self._grammars.compile(grammar)

    def _make_matcher(self, grammar: GrammarSpec | None) -> GrammarMatcher | None:
        if grammar is None:
            return None
        try:
            return self.prepare(grammar).result(GRAMMAR_TIMEOUT_S).fork()
        except TimeoutError:
            raise InvalidRequest(
                f"compiling the {grammar.kind} takes more than {GRAMMAR_TIMEOUT_S:g} s", hint="simplify the grammar"
            ) from None


class Sampler:
    def __init__(self, vocab: int, make_state: SamplingStateFactory) -> None:
        self._vocab = vocab
        self._make_state = make_state
        self._states: dict[str, SamplingState] = {}
        self._penalties: dict[str, PenaltyCounts] = {}  # of the requests that have penalties

    def admit(self, admission: Admission) -> str | None:
        """Add a request; return an error message if its tokens cannot be sampled, else None."""
        try:
            row = self._states[admission.id] = self._make_state(admission)
        except InvalidRequest as e:
            return str(e)
        if row.params.has_penalties:
            self._penalties[admission.id] = PenaltyCounts(row.params, row.tokens, row.prompt_len)
        return None

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._penalties.pop(request_id, None)

    def sample(self, work: Sequence[WorkItem], logits: Tensor) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Sample the next tokens of each request. The logits are overwritten.

        Return the tokens, and errors of requests that cannot continue, both by request id. `logits`: for each work item
        one row after its last known token, then one after each drafted token. A row is used only if all drafted tokens
        before it were sampled. Tokens are sampled one after the other, as without a draft."""
        if len(work) == len(logits):  # there are no drafts
            return self._sample_rows([w.id for w in work], logits)
        tokens: dict[str, list[SampledToken]] = {}
        failed: dict[str, str] = {}
        ends = list(accumulate(1 + w.num_draft for w in work))
        alive = [(w, end - 1 - w.num_draft) for w, end in zip(work, ends, strict=True)]  # with its next row
        while alive:
            sampled, lost = self._sample_rows([w.id for w, _ in alive], logits[[row for _, row in alive]])
            for name, one in sampled.items():
                tokens.setdefault(name, []).append(one)
            # A failure after other tokens of this step is not reported: the next step fails again, after these tokens.
            failed |= {name: why for name, why in lost.items() if name not in tokens}
            alive = [(w, row + 1) for w, row in alive if w.id in sampled and _continues_draft(w, tokens[w.id])]
        for first, *further in tokens.values():
            first.further = further
        return {name: found[0] for name, found in tokens.items()}, failed

    def _sample_rows(
        self, request_ids: Sequence[str], logits: Tensor
    ) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Sample one token for each request from its row of the logits, which are overwritten."""
        rows = [self._states[i] for i in request_ids]
        scored = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[scored] if scored else logits[:0]
        self._apply_penalties(request_ids, logits)
        self._apply_edits_and_masks(rows, logits)
        params = [row.params for row in rows]
        seeds = np.array([row.seed % (1 << 64) for row in rows], np.uint64).view(np.int64)
        chosen = ops.sample_with_seed(
            logits,
            ops.SamplingTensors(
                torch.tensor([p.temperature for p in params], dtype=torch.float32),
                torch.tensor([p.top_k for p in params], dtype=torch.int32),
                torch.tensor([p.top_p for p in params], dtype=torch.float32),
                torch.tensor([p.min_p for p in params], dtype=torch.float32),
            ),
            torch.from_numpy(seeds),
            torch.tensor([len(row.tokens) for row in rows], dtype=torch.int32),
        ).tolist()
        tops = [params[i].logprobs or 0 for i in scored]
        logprobs = dict(zip(scored, token_logprobs(raw, [chosen[i] for i in scored], tops), strict=True))
        sampled, failed = {}, {}
        for i, (request_id, row, token) in enumerate(zip(request_ids, rows, chosen, strict=True)):
            if row.error is None:  # the mask was valid
                row.append_token(token)
                if (penalties := self._penalties.get(request_id)) is not None:
                    penalties.add(token)
            if row.error is None:
                sampled[request_id] = SampledToken(token, logprobs.get(i), stop=row.is_complete)
            else:
                failed[request_id] = row.error
        return sampled, failed

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """Return the request's prompt and all tokens sampled so far."""
        return self._states[request_id].tokens

    def forced_tokens(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """Return the tokens that grammars force next, by request id. Requests without any are left out."""
        return {i: tokens for i in request_ids if (tokens := self._states[i].forced_tokens())}

    def prompt_logprobs(self, request_id: str, start: int, logits: Tensor) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt tokens at positions start + 1, start + 2, ...

        Row i of the logits scores the token at position start + i + 1. The last row is not used if that token is not
        known yet."""
        row = self._states[request_id]
        successors = row.tokens[start + 1 : start + 1 + len(logits)]
        return token_logprobs(
            logits[: len(successors)], successors, [row.params.prompt_logprobs or 0] * len(successors)
        )

    def _apply_penalties(self, request_ids: Sequence[str], logits: Tensor) -> None:
        for i, request_id in enumerate(request_ids):
            if (penalties := self._penalties.get(request_id)) is not None:
                penalties.apply(logits[i].numpy())

    def _apply_edits_and_masks(self, states: Sequence[SamplingState], logits: Tensor) -> None:
        for i, row in enumerate(states):
            if (edits := row.logit_edits(len(row.tokens))) is not None:
                edits.apply(logits[i].numpy())
        masked = [(i, row.matcher) for i, row in enumerate(states) if row.matcher is not None]
        if masked:
            mask = np.full((len(masked), -(-self._vocab // 32)), -1, np.int32)
            fill_masks([matcher for _, matcher in masked], mask)
            ops.apply_bitmask(logits, torch.from_numpy(mask), torch.tensor([i for i, _ in masked]))


def _continues_draft(work: WorkItem, sampled: Sequence[SampledToken]) -> bool:
    """Return whether the newest sampled token equals the drafted one, so that the next row of the logits is valid."""
    at = len(work.tokens) - work.num_draft + len(sampled) - 1
    return at < len(work.tokens) and sampled[-1].token == work.tokens[at] and not sampled[-1].stop


def split_logit_rows(work: Sequence[WorkItem]) -> tuple[list[tuple[WorkItem, slice]], list[int]]:
    """Return the rows of the logits that score each prompt, and the rows from which tokens are sampled.

    The rows of the logits are in the order of the step's work items."""
    scored: list[tuple[WorkItem, slice]] = []
    sampled: list[int] = []
    end = 0
    for w in work:
        begin, end = end, end + (len(w.tokens) if w.prompt_logprobs else w.num_draft + int(w.samples))
        if w.prompt_logprobs:
            scored.append((w, slice(begin, end)))
        if w.samples:
            sampled.extend(range(end - 1 - w.num_draft, end))
    return scored, sampled


def token_logprobs(logits: Tensor, tokens: Sequence[int], top_counts: Sequence[int]) -> list[TokenLogprob]:
    if not tokens:
        return []
    found = ops.log_probs(logits, torch.tensor(tokens, device=logits.device), max(top_counts))
    return list_logprobs(found, top_counts)


def list_logprobs(logprobs: LogProbs, top_counts: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens. `top_counts`: for each, how many of the most likely tokens are listed."""
    chosen, top_ids, top_values, rank = logprobs
    ids, values = top_ids.tolist(), top_values.tolist()
    return [
        TokenLogprob(c, r, list(zip(ids[i][:n], values[i][:n], strict=True)))
        for i, (c, r, n) in enumerate(zip(chosen.tolist(), rank.tolist(), top_counts, strict=True))
    ]
