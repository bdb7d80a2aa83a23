"""What the Triton kernels of recurrent layers must do, on any device: what kernels/delta_rule.py does in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels import delta_rule
from emberline.kernels.arguments import AttentionMetadata
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.triton.convolution import convolve
from emberline.kernels.triton.delta import compute_delta_rule
from emberline.kernels.triton.output_gate import apply_sigmoid_gate, norm_and_gate

Row = tuple[int, int]  # tokens before the step, and new tokens


class Sizes(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4


class DeltaCase:
    def __init__(
        self, sizes: Sizes, few: list[Row], chunks: list[Row], device: str, dtype: torch.dtype, padding: int = 2
    ) -> None:
        """`few`: sequences with few tokens. `padding`: tokens after those of all sequences."""
        random, rows = torch.Generator().manual_seed(5), [*few, *chunks]
        counts = torch.tensor([count for _, count in rows])
        starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
        self.tokens, self.device = int(counts.sum()), device
        channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        self.layer = DeltaLayer(
            *sizes[:4],
            conv_weight=numbers(sizes.kernel, channels),
            rates=numbers(sizes.value_heads).abs(),
            time_bias=numbers(sizes.value_heads),
        )
        slots = torch.randperm(len(rows) + 2, generator=random)[: len(rows)].int()
        context = torch.tensor([before for before, _ in rows], dtype=torch.int32)
        empty = torch.empty(0)
        metadata = AttentionMetadata(empty, empty, starts, context, empty)
        conv = numbers(len(rows) + 2, sizes.kernel - 1, channels)
        matrices = numbers(len(rows) + 2, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.states = LayerStates(conv, matrices, slots, metadata, few_token_rows=len(few))
        width = channels + self.layer.values + 2 * sizes.value_heads
        self.projected = numbers(self.tokens + padding, width).to(dtype)
        self.projected[0, -sizes.value_heads] = 30.0  # so large that softplus is the identity
        self.norm = numbers(sizes.value_dim)

    def split(self, device: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, DeltaGates]:
        heads = self.layer.value_heads
        whole = self.projected.to(device=device, dtype=dtype)
        x, gate, steps, times = whole.split([self.layer.channels, self.layer.values, heads, heads], dim=1)
        return x, gate, DeltaGates(steps, times)

    def on_device(self) -> tuple[DeltaLayer, LayerStates]:
        layer, states, device = self.layer, self.states, self.device
        tensors = {name: getattr(layer, name).to(device) for name in ("conv_weight", "rates", "time_bias")}
        sizes = layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
        starts, context = (each.to(device) for each in (states.metadata.query_start, states.metadata.context))
        metadata = AttentionMetadata(starts, starts, starts, context, starts)
        moved = [each.to(device, copy=True) for each in states[:3]]
        return DeltaLayer(*sizes, **tensors), LayerStates(*moved, metadata, few_token_rows=states.few_token_rows)

    def check(self, *, pdl: bool = False) -> None:
        """Each kernel gets the inputs that the reference had, so that errors do not add up."""
        dtype, used = self.projected.dtype, slice(0, self.tokens)
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        layer, states = self.on_device()
        x, gate, gates = self.split(self.device)
        x_ref, gate_ref, gates_ref = self.split("cpu", torch.float32)
        before = LayerStates(self.states.conv.clone(), self.states.matrices.clone(), *self.states[2:])
        expected = delta_rule.convolve(x_ref, self.layer, before).to(dtype)
        mixed = convolve(x, layer, states, pdl=pdl)
        torch.testing.assert_close(mixed[used].cpu(), expected[used], **tolerance)
        torch.testing.assert_close(states.conv.cpu(), before.conv, rtol=0, atol=0)
        ours = compute_delta_rule(expected.to(self.device), gates, layer, states, pdl=pdl)
        theirs = delta_rule.compute_delta_rule(expected.float(), gates_ref, self.layer, before)
        torch.testing.assert_close(ours[used].float().cpu(), theirs[used], **tolerance)
        torch.testing.assert_close(states.matrices.cpu(), before.matrices, **tolerance)
        unused = [slot for slot in range(len(before.conv)) if slot not in self.states.slots.tolist()]
        assert torch.equal(states.matrices[unused].cpu(), self.states.matrices[unused]), "a slot of no sequence"
        out = theirs.to(dtype)
        gated = norm_and_gate(out.to(self.device, copy=True), gate, self.norm.to(self.device), 1e-3, pdl=pdl)
        normed = delta_rule.norm_and_gate(out.float(), gate_ref, self.norm, 1e-3)
        torch.testing.assert_close(gated[used].float().cpu(), normed[used], **tolerance)
        scaled = apply_sigmoid_gate(out.to(self.device, copy=True), gate, pdl=pdl)
        torch.testing.assert_close(scaled.float().cpu()[used], (out.float() * gate_ref.sigmoid())[used], **tolerance)
