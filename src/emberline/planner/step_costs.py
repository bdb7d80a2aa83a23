"""ProjectedCosts: estimates the duration of a step from the bytes that it reads and the operations that it computes.

Measured steps of the same shape can correct the estimates. `measured_shapes.projection_error` returns the errors of
estimates without such a correction."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import hypot, log

from emberline.core.plan import StepPlan
from emberline.core.step_costs import sum_work
from emberline.planner.collective_times import all_reduce_us
from emberline.planner.gpu_speeds import GPUSpeed
from emberline.planner.step_work import StepWork

# Fitted to the measured steps of sim/cost_tables.json: shares of the GPU's speed, and fixed times.
DENSE_READ_SHARE, EXPERT_READ_SHARE, KV_READ_SHARE = 0.98, 0.85, 0.96
PRODUCT_SHARE, FP8_PRODUCT_SHARE = 0.85, 0.7
ATTENTION_SHARE, LATENT_ATTENTION_SHARE = 0.88, 0.55  # share of a GPU's peak speed that attention of prompts attains
LAYER_S = 14e-6  # seconds of a layer besides what is read and computed
STAGE_HOP_S = 20e-6  # seconds from one pipeline stage to the next


@dataclass(frozen=True, slots=True)
class CostCorrection:
    """Ratios of the measured to the projected time of a step without attention, by the number of tokens.

    Between two numbers of tokens, the ratio is interpolated over their logarithm."""

    points: tuple[tuple[int, float], ...] = ()  # tokens, ratio; by tokens

    def at(self, tokens: int) -> float:
        if not self.points:
            return 1.0
        sizes = [size for size, _ in self.points]
        right = bisect_left(sizes, tokens)
        if right in (0, len(sizes)):
            return self.points[min(right, len(sizes) - 1)][1]
        (low, first), (high, second) = self.points[right - 1], self.points[right]
        return first + (second - first) * log(tokens / low) / log(high / low)

    def combine(self, other: CostCorrection) -> CostCorrection:
        """Return a correction whose ratios are the products of the ratios of both corrections."""
        sizes = sorted({size for size, _ in (*self.points, *other.points)})
        return CostCorrection(tuple((size, self.at(size) * other.at(size)) for size in sizes))


NO_CORRECTION = CostCorrection()


@dataclass(frozen=True, slots=True)
class ProjectedCosts:
    gpu: GPUSpeed
    work: StepWork  # work of one GPU in a step
    hidden: int
    ranks: int = 1  # GPUs that divide each layer
    stages: int = 1  # stages of the pipeline; a step passes all of them
    correction: CostCorrection = NO_CORRECTION
    plans_ahead: bool = True  # step n + 1 is planned while step n runs

    def step_seconds(
        self, decode_rows: int, decode_context: float, prompt_tokens: int = 0, prompt_pairs: float = 0.0
    ) -> float:
        """Return the duration of a step.

        `decode_context`: tokens of the contexts of all decoding requests. `prompt_pairs`: pairs of a query and a key
        in the chunks of prompts."""
        tokens = decode_rows + prompt_tokens
        if not tokens:
            return 0.0
        attention = self.attention_seconds(decode_rows, decode_context, prompt_pairs)
        seconds = self.correction.at(tokens) * self._product_seconds(decode_rows, prompt_tokens)
        sampled = decode_rows + bool(prompt_tokens)
        return seconds + attention + self.collective_seconds(tokens, sampled)

    def attention_seconds(self, decode_rows: int, decode_context: float, prompt_pairs: float) -> float:
        context = decode_context / decode_rows if decode_rows else 0.0
        reading = self.work.kv_bytes(decode_rows, context) / KV_READ_SHARE / self.gpu.read_bytes_s
        share = LATENT_ATTENTION_SHARE if self.work.has_latents else ATTENTION_SHARE
        return reading + prompt_pairs * self.work.pair_flops / share / self.gpu.bf16_flops

    def _product_seconds(self, decode_rows: int, prompt_tokens: int) -> float:
        tokens, work, gpu = decode_rows + prompt_tokens, self.work, self.gpu
        reading = (
            work.dense_bytes / DENSE_READ_SHARE + (work.weight_bytes(tokens) - work.dense_bytes) / EXPERT_READ_SHARE
        ) / gpu.read_bytes_s
        sampled = decode_rows + bool(prompt_tokens)
        products = 2.0 * (work.multiplied_weights(tokens) + work.head_weights * sampled)
        is_fp8 = work.weight_format == "fp8"
        flops = FP8_PRODUCT_SHARE * gpu.fp8_flops if is_fp8 else PRODUCT_SHARE * gpu.bf16_flops
        rows = tokens * work.expert_row_bytes / gpu.read_bytes_s
        return work.layers * LAYER_S + hypot(reading, products / flops) + rows

    def estimate_step_seconds(self, plan: StepPlan) -> float:
        return self.step_seconds(*sum_work(plan.work))

    def collective_seconds(self, tokens: int, sampled: int) -> float:
        """Return the seconds of a step's collectives (from published times) and hops between pipeline stages.

        `sampled`: the number of rows whose logits are computed."""
        seconds = (self.stages - 1) * STAGE_HOP_S
        if self.ranks > 1:  # sums after the embedding, attention and feed-forward network; then the logits' parts
            seconds += (2 * self.work.layers + 1) * all_reduce_us(tokens * self.hidden, self.ranks) * 1e-6
            logits = sampled * self.ranks * self.work.head_weights // self.hidden
            seconds += all_reduce_us(logits, self.ranks) * 1e-6
        return seconds
