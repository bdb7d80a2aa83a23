"""What the Triton kernels of recurrent layers must do, on any device: what kernels/delta_rule.py does in torch."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels import delta_rule
from emberline.kernels.arguments import AttentionMetadata
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates, StateDrafts, StateSaves
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


class DraftCase:
    """Sequences with drafts, of which some are accepted, and copies of states within the step, beside a prompt."""

    COUNT, MAX_DRAFT, PROMPT = 3, 3, 9

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        self.case = DeltaCase(sizes, [(5, 1)] * self.COUNT + [(0, 0)], [(0, self.PROMPT)], device, dtype)
        self.layer, self.dtype, self.device = self.case.layer, dtype, device
        self.on_device, _ = self.case.on_device()
        self.slots = torch.randperm(len(self.case.states.conv), generator=torch.Generator().manual_seed(7)).int()

    def make_states(self, device: str, dtype: torch.dtype) -> LayerStates:
        """Return states, and kept rows with NaN, which must not be read."""
        conv, matrices, *_ = self.case.states
        widths = self.layer.channels, self.layer.draft_width
        kept = [torch.full((self.COUNT, self.MAX_DRAFT, w), torch.nan, device=device, dtype=dtype) for w in widths]
        empty = torch.empty(0, device=device)
        drafts, metadata = StateDrafts(*kept, empty, empty, empty), AttentionMetadata(empty, empty, empty, empty, empty)
        moved = [each.to(device, copy=True) for each in (conv, matrices, self.slots[:5])]
        return LayerStates(*moved, metadata, None, drafts, few_token_rows=self.COUNT + 1)

    def make_step(self, chooser: Random, accepted: list[int]) -> tuple[list[int], list[Tensor]]:
        """Return the numbers of drafted tokens, and the integers of a step."""
        drafted = [chooser.randint(0, self.MAX_DRAFT) for _ in accepted]
        edges = [0, *accumulate([*(1 + each for each in drafted), 0, self.PROMPT])]
        copied, after = chooser.randrange(self.COUNT), [0] * 5
        after[copied] = chooser.randint(0, accepted[copied] + 1)
        rows = edges, [5, 5, 5, 0, 0], [2, 0, 1, 0, 0], [*accepted, 0, 0], [*drafted, 0, 0], [self.slots[-1]] * 5, after
        return drafted, [torch.tensor(each, dtype=torch.int32) for each in rows]

    def with_step(self, states: LayerStates, integers: list[Tensor]) -> LayerStates:
        starts, context, places, accepted, drafted, to, after = (each.to(states.conv.device) for each in integers)
        assert states.drafts is not None
        drafts = states.drafts._replace(draft_slots=places, accepted=accepted, counts=drafted)
        metadata = AttentionMetadata(starts, starts, starts, context, starts)
        return states._replace(metadata=metadata, saves=StateSaves(to, after), drafts=drafts)

    def check(self, *, steps: int = 4, pdl: bool = False) -> None:
        random, chooser, accepted = torch.Generator().manual_seed(7), Random(3), [0] * self.COUNT
        theirs, ours = self.make_states("cpu", torch.float32), self.make_states(self.device, self.dtype)
        is_exact, heads = self.dtype is torch.float32, self.layer.value_heads
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if is_exact else {"rtol": 3e-2, "atol": 3e-2}
        for _ in range(steps):
            drafted, integers = self.make_step(chooser, accepted)
            x = torch.randn(int(integers[0][-1]), self.layer.channels + 2 * heads, generator=random).to(self.dtype)
            before, after = self.with_step(theirs, integers), self.with_step(ours, integers)
            inputs, *gates = x.float().split([self.layer.channels, heads, heads], 1)
            mixed = delta_rule.convolve(inputs, self.layer, before).to(self.dtype)
            expected = delta_rule.compute_delta_rule(mixed.float(), DeltaGates(*gates), self.layer, before)
            inputs, *gates = x.to(self.device).split([self.layer.channels, heads, heads], 1)
            found = convolve(inputs, self.on_device, after, pdl=pdl)
            torch.testing.assert_close(found.cpu(), mixed, **tolerance)
            out = compute_delta_rule(
                mixed.to(self.device, copy=True), DeltaGates(*gates), self.on_device, after, pdl=pdl
            )
            torch.testing.assert_close(out.cpu().float(), expected, **tolerance)
            for mine, their in zip(ours[:2], theirs[:2], strict=True):
                torch.testing.assert_close(mine.cpu(), their, **tolerance)
            accepted = [chooser.randint(0, each) for each in drafted]
