"""load_decay_and_step: the decay and the step size of a token, for kernels of the gated delta rule."""

from __future__ import annotations

import triton.language as tl
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit

LINEAR_ABOVE: constexpr = constexpr(20.0)  # softplus(x) is x above


@jit
def load_decay_and_step(
    times: tensor, steps: tensor, rate: tensor, bias: tensor, at: tensor, inside: tensor
) -> tuple[tensor, tensor]:
    """Return the logarithm of the decay and the step size of tokens, whose gates are at the offset `at`.

    `rate`, `bias`: of the value head; loops over tokens load them once."""
    time = tl.load(times + at, inside, 0.0).to(tl.float32) + bias
    softplus = tl.where(time > LINEAR_ABOVE, time, tl.log(1.0 + tl.exp(tl.minimum(time, LINEAR_ABOVE))))
    step = 1.0 / (1.0 + tl.exp(-tl.load(steps + at, inside, 0.0).to(tl.float32)))
    return -rate * softplus, step
