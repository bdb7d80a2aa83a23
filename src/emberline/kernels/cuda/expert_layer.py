"""ExpertLayer: runs a mixture of experts on an NVIDIA GPU.

Many rows are computed in several passes, to bound the memory for the experts' inputs and outputs. Each pass reads the
weights of the experts again. A row's result is that of a step with only the rows of its pass.

With few rows, the shared expert runs in a second stream. Its weights are read while the router runs and the rows are
sorted by expert, because these two use little of the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.cuda import narrow_experts, routed_experts, router, wide
from emberline.kernels.mixture import LocalExpertSums, Mixture, Routing, SelectedExperts, SharedExpert, StackedExperts
from emberline.kernels.op_backend import OpBackend
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.triton import experts, linear, norm, routing
from emberline.kernels.triton import router as triton_router
from emberline.kernels.triton.exact_sums import sum_exactly
from emberline.kernels.triton.grouped import add_expert_outputs
from emberline.kernels.triton.slotted_rows import select_slots
from emberline.kernels.work_limits import PASS_ROW_GRAIN, max_pass_rows, split_evenly

UNUSED_TILE_ROWS = 16  # `route_rows` needs a tile size, but `select` ignores the tiles
MAX_ROWS_IN_TWO_STREAMS = 64  # with 256 rows of DeepSeek-V2-Lite, one stream is 3 % faster


class ExpertLayer:
    def __init__(self, backend: OpBackend, *, uses_hopper: bool = False) -> None:
        """`backend` computes the router and the shared expert, whose matrices multiply all rows.

        `uses_hopper`: whether kernels for an H100 or H200 compute the routed experts.
        """
        self._backend, self._uses_hopper = backend, uses_hopper
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # second streams

    def run(self, x: Tensor, mixture: Mixture, out: Tensor) -> Tensor:
        """Add the output of the mixture for x to `out`, which may be x, and return `out`."""
        for part in _split_rows(len(x), mixture):
            self._run_pass(x[part], mixture, out[part])
        return out

    def _run_pass(self, x: Tensor, mixture: Mixture, out: Tensor) -> None:
        shared = mixture.shared
        normed, logits = self._norm_and_score(x, mixture)
        if shared is None:
            if not self._uses_hopper or not routed_experts.add_selected_experts(out, normed, logits, mixture):
                self._add_experts(out, normed, logits, mixture)
            return
        assert mixture.clamp is None, "no shared expert has a clamped activation"
        second, gate = self._get_second_stream(x.device), None
        if shared.gate is not None:
            gate = self._backend.linear(normed, LinearLayer(shared.gate), LinearOutput(float32=True))
        if len(x) <= MAX_ROWS_IN_TWO_STREAMS:
            self._run_in_two_streams(second, out, normed, logits, mixture, gate)
            return
        adds = gate is None and shared.scale == 1.0
        outputs = self._compute_shared(normed, shared, out if adds else None)
        self._add_experts(out, normed, logits, mixture, None if adds else outputs, gate)

    def select(self, x: Tensor, mixture: Mixture) -> SelectedExperts:
        """Norm the rows of x, and select the experts of each row among the experts of all ranks."""
        normed, logits = self._norm_and_score(x, mixture)
        rows = routing.route_rows(logits, replace(mixture.routing, local_experts=None), UNUSED_TILE_ROWS, pdl=True)
        numbers, order = rows.chosen.view(len(x), -1).sort(dim=1)
        return SelectedExperts(normed, rows.weights.view(len(x), -1).gather(1, order), numbers)

    def run_assigned_experts(self, x: Tensor, numbers: Tensor, mixture: Mixture) -> Tensor:
        """Return the output of one given expert for each row of x.

        `numbers`: the index of each row's expert among the experts of this rank. The kernels select experts by logits,
        so this passes logits that are 1 for the given expert and 0 for all others."""
        given = replace(mixture, routing=Routing(1, renormalize=True), shared=None)
        assert isinstance(mixture.experts, StackedExperts)
        logits = torch.zeros(len(x), mixture.experts.count, dtype=torch.float32, device=x.device)
        logits.scatter_(1, numbers.long()[:, None], 1.0)
        out = torch.zeros_like(x)
        for part in _split_rows(len(x), given):
            self._add_experts(out[part], x[part], logits[part], given)
        return out

    def sum_local(self, x: Tensor, mixture: Mixture) -> LocalExpertSums:
        """Return what this rank adds to the output of a mixture whose experts are in slots (see ExpertSlots).

        `expert_ops.sum_local_experts` describes the result. The choice of kernels depends only on the number of rows,
        so an expert's output for a row has the same bits in every slot."""
        assert mixture.slots is not None
        normed, logits = self._norm_and_score(x, mixture)
        rows = select_slots(logits, mixture.routing, mixture.slots, pdl=True)
        local = replace(mixture, routing=replace(mixture.routing, local_experts=mixture.slots.local_slots))
        if matrices := narrow_experts.find_matrices(mixture):
            outputs = narrow_experts.run_routed_experts(normed, logits, local, matrices, route=rows.sort)
        else:
            outputs = experts.run_routed_experts(normed, logits, local, pdl=True, route=rows.sort)
        shared = None
        if mixture.shared is not None:
            shared = self.add_shared(torch.zeros_like(normed), normed, mixture.shared)
        return LocalExpertSums(
            sum_exactly(outputs, mixture.routing.experts_per_row, shared=shared, pdl=True), rows.slots
        )

    def add_shared(self, out: Tensor, normed: Tensor, shared: SharedExpert) -> Tensor:
        """Add the output of the shared expert for the rows `normed` to `out` in place, and return `out`."""
        adds = shared.gate is None and shared.scale == 1.0
        outputs = self._compute_shared(normed, shared, out if adds else None)
        if adds:
            return outputs
        weights = torch.full((len(out), 1), shared.scale, dtype=torch.float32, device=out.device)
        if shared.gate is not None:
            weights *= self._backend.linear(normed, LinearLayer(shared.gate), LinearOutput(float32=True)).sigmoid()
        return out.add_((outputs * weights).to(out.dtype))

    def _norm_and_score(self, x: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
        """Return the normed rows, and the router's logits in float32."""
        weight, bias = mixture.router, mixture.routing.bias
        if weight.layout is WeightLayout.ROWS and not weight.fixed_order:
            if len(x) <= triton_router.MAX_ROWS:
                return triton_router.norm_and_score(x, mixture.norm, mixture.eps, weight.data, bias, pdl=True)
            if self._uses_hopper and router.supports(x, weight.data):
                return router.norm_and_score(x, mixture.norm, mixture.eps, weight.data, bias)
        normed = norm.rms_norm(x, mixture.norm, mixture.eps, pdl=True)
        return normed, self._backend.linear(normed, LinearLayer(weight, bias), LinearOutput(float32=True))

    def _get_second_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream on which the shared expert runs. The first call must not be captured.

        Kernels exchange partial sums in memory that belongs to their stream and must be zeroed before a capture.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            with torch.cuda.stream(self._streams[device]):
                if self._uses_hopper:
                    wide.get_exchange_memory(device)
                linear.arrival_counters(device)
        return self._streams[device]

    def _run_in_two_streams(
        self,
        second: torch.cuda.Stream,
        x: Tensor,
        normed: Tensor,
        logits: Tensor,
        mixture: Mixture,
        gate: Tensor | None,
    ) -> Tensor:
        shared = mixture.shared
        assert shared is not None
        # Allocated in the main stream, which waits for the second one before the memory is used again.
        inner, outputs = x.new_empty(len(x), shared.expert.down.k), torch.empty_like(x)
        main = torch.cuda.current_stream(x.device)
        second.wait_stream(main)
        try:
            with torch.cuda.stream(second):
                self._run_shared(normed, shared, inner, outputs)
            routed = self._run_routed(normed, logits, mixture)
        finally:  # also after an error: a capture cannot end while a stream is not joined, and memory is reused
            main.wait_stream(second)
        return add_expert_outputs(
            x, routed.outputs, mixture.routing.experts_per_row, places=routed.places, weights=routed.weights,
            shared=outputs, shared_gate=gate, shared_scale=shared.scale,
        )  # fmt: skip

    def _compute_shared(self, normed: Tensor, shared: SharedExpert, add_to: Tensor | None) -> Tensor:
        """Return the outputs of the shared expert, or add them to `add_to` in place and return it."""
        inner = self._backend.gate_up_silu(normed, LinearLayer(shared.expert.gate_up))
        return self._backend.linear(inner, LinearLayer(shared.expert.down), LinearOutput(add_to=add_to))

    def _run_shared(self, normed: Tensor, shared: SharedExpert, inner: Tensor, outputs: Tensor) -> None:
        self._backend.gate_up_silu(normed, LinearLayer(shared.expert.gate_up), out=inner)
        self._backend.linear(inner, LinearLayer(shared.expert.down), LinearOutput(out=outputs))

    def _add_experts(
        self,
        x: Tensor,
        normed: Tensor,
        logits: Tensor,
        mixture: Mixture,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        routed = self._run_routed(normed, logits, mixture)
        return add_expert_outputs(
            x, routed.outputs, mixture.routing.experts_per_row, places=routed.places, weights=routed.weights,
            shared=shared, shared_gate=gate, shared_scale=mixture.shared_scale, pdl=True,
        )  # fmt: skip

    def _run_routed(self, normed: Tensor, logits: Tensor, mixture: Mixture) -> routed_experts.RoutedOutputs:
        if matrices := narrow_experts.find_matrices(mixture):
            outputs = narrow_experts.run_routed_experts(normed, logits, mixture, matrices)
            return routed_experts.RoutedOutputs(outputs)
        if self._uses_hopper:
            return routed_experts.run_routed_experts(normed, logits, mixture)
        return routed_experts.RoutedOutputs(experts.run_routed_experts(normed, logits, mixture, pdl=True))


def _split_rows(rows: int, mixture: Mixture) -> Iterator[slice]:
    """Yield the range of rows that each pass computes."""
    limit = max_pass_rows(mixture.router.n, mixture.routing.experts_per_row)
    return split_evenly(rows, limit, PASS_ROW_GRAIN)
