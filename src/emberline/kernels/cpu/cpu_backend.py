"""CPUBackend: the ops as C++ kernels on the CPU. Ops without a native kernel run in plain torch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from emberline.kernels.arguments import AttentionInputs, AttentionLayer, AttentionMetadata, LinearLayer, LinearOutput
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kernels.cpu.library import NativeConvolution, NativeDeltaRule, NativeSequences, NativeStep
from emberline.kernels.cpu.weight_arena import WeightArena
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.dense_stack import DenseStack
from emberline.kernels.gguf_blocks import DamagedBlocks, find_block_format
from emberline.kernels.mixture import Mixture, SelectedExperts, StackedExperts
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.reference import ReferenceBackend
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors
from emberline.kernels.weight_unpacker import WeightUnpacker

STORE, ADD, GATED_SILU, GATED_GELU = 0, 1, 2, 3  # what ember_linear does with a product

PANEL_LAYOUTS = {
    torch.bfloat16: WeightLayout.BF16,
    torch.float16: WeightLayout.F16,
    torch.float32: WeightLayout.F32,
}


class CPUBackend(ReferenceBackend):
    """Runs the native kernels.

    A weight with a negative `WeightLayout` was packed by a different backend; plain torch computes its products.
    """

    library: ctypes.CDLL

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self.library, self.isa = library, library.ember_isa().decode()
        self._arena = WeightArena()

    def __str__(self) -> str:
        return f"native ({self.isa})"

    def set_threads(self, threads: int) -> None:
        self.library.ember_set_threads(threads)

    def progress_count(self) -> int:
        return int(self.library.ember_progress())

    def pack_linear(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        """Return the weight rearranged into panels of columns, which the kernels read in order.

        A bf16 or float16 weight keeps its dtype. On a CPU that multiplies bf16 (AMX, AVX512-BF16, bfmmla), products
        with a bf16 weight also round their inputs to bf16.
        """
        assert not gated or weight.shape[0] % 2 == 0
        layout = PANEL_LAYOUTS.get(weight.dtype, WeightLayout.F32)
        if layout is WeightLayout.BF16 and self.library.ember_has_bf16():
            layout = WeightLayout.BF16_TILES
        rows = (weight.float() if layout is WeightLayout.F32 else weight).contiguous()
        (n, k), panel = rows.shape, self.library.ember_panel()
        depth = -(-k // 32) * 32 if layout is WeightLayout.BF16_TILES else k
        data = torch.empty(-(-n // panel) * panel * depth, dtype=rows.dtype)
        self.library.ember_pack(rows.data_ptr(), data.data_ptr(), layout, n, k, gated)
        return PackedWeight(data, n, k, weight.dtype, layout, gated, data.data_ptr())

    def pack_gguf(self, blocks: Tensor, type_name: str, k: int, *, gated: bool = False) -> PackedWeight:
        """Return the codes and scales of the blocks rearranged into panels of columns, about as large as in the file.

        Products with this weight round each 32 consecutive inputs to int8 with a common scale. Raises DamagedBlocks if
        a scale is NaN or infinite.
        """
        found = find_block_format(blocks, type_name, k)
        rows, n, layout = blocks.contiguous(), len(blocks), found.layout
        assert not gated or n % 2 == 0
        data = self._arena.allocate(self.library.ember_blocks_bytes(layout, n, k))
        if not self.library.ember_pack_blocks(rows.data_ptr(), data.data_ptr(), layout, n, k, gated):
            raise DamagedBlocks(f"a block of {type_name} has a scale that is NaN or infinite")
        return PackedWeight(data, n, k, torch.bfloat16, layout, gated, data.data_ptr())

    def linear(self, x: Tensor, layer: LinearLayer, output: LinearOutput) -> Tensor:
        w = layer.weight
        if w.layout < 0:
            return super().linear(x, layer, output)
        x, (m, k), add_to = x.contiguous(), x.shape, output.add_to
        assert k == w.k and not w.gated
        y = add_to if add_to is not None else _check_or_allocate_output(output.out, m, w.n)
        assert y.is_contiguous()
        mode = STORE if add_to is None else ADD
        self.library.ember_linear(
            x.data_ptr(),
            w.ptr,
            w.layout,
            m,
            w.n,
            k,
            _address(layer.bias),
            _address(layer.norm),
            layer.eps,
            y.data_ptr(),
            mode,
        )
        return y

    def gate_up_silu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        if layer.weight.layout < 0:
            return super().gate_up_silu(x, layer, out)
        return self._run_gated(x, layer, out, GATED_SILU)

    def gate_up_gelu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        if layer.weight.layout < 0:
            return super().gate_up_gelu(x, layer, out)
        return self._run_gated(x, layer, out, GATED_GELU)

    def _run_gated(self, x: Tensor, layer: LinearLayer, out: Tensor | None, mode: int) -> Tensor:
        w, (m, k) = layer.weight, x.shape
        assert k == w.k and w.gated and x.is_contiguous()
        y = _check_or_allocate_output(out, m, w.n // 2)
        self.library.ember_linear(
            x.data_ptr(), w.ptr, w.layout, m, w.n, k, None, _address(layer.norm), layer.eps, y.data_ptr(), mode
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return self._run_norm(x, weight, eps, out, centered=False)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return self._run_norm(x, weight, eps, out, centered=True)

    def _run_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, centered: bool) -> Tensor:
        rows, groups, width = len(x), weight.numel() // weight.shape[-1], weight.shape[-1]
        assert x.shape == out.shape == (rows, groups * width) and x.stride(1) == out.stride(1) == 1
        assert x.dtype == weight.dtype == out.dtype == torch.float32 and weight.is_contiguous()
        self.library.ember_norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), eps, rows, groups, width, centered, out.data_ptr(),
            out.stride(0),
        )  # fmt: skip
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        assert x.is_contiguous() and x.dtype == torch.float32
        self.library.ember_soft_cap(x.data_ptr(), x.numel(), cap)
        return x

    def embed(self, ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
        if isinstance(table, PackedWeight):
            if table.layout < 0:
                return super().embed(ids, table)
            assert not table.gated
            pointer, layout, k, packed = table.ptr, table.layout, table.k, True
        elif table.dtype in PANEL_LAYOUTS:
            assert table.is_contiguous()
            layout = PANEL_LAYOUTS[table.dtype]
            pointer, k, packed = table.data_ptr(), table.shape[1], False
        else:
            return super().embed(ids, table)
        y = torch.empty(len(ids), k)
        self.library.ember_embed(ids.data_ptr(), len(ids), pointer, layout, k, packed, y.data_ptr())
        return y

    def rope_and_cache(
        self, qkv: Tensor, layer: AttentionLayer, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> None:
        positions, slots, cos_sin = metadata.positions, metadata.slots, layer.cos_sin
        assert positions.dtype == torch.int32 and slots.dtype == torch.int64 and qkv.is_contiguous()
        self.library.ember_rope(
            qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1],
            _address(layer.q_norm), _address(layer.k_norm), layer.eps,
            keys.data_ptr(), None if layer.latent_dim else values.data_ptr(), _is_float32_cache(keys), keys.stride(0),
            values.stride(0), slots.data_ptr(), len(positions), layer.q_heads, layer.kv_heads, layer.head_dim,
            values.shape[2], layer.interleaved,
        )  # fmt: skip

    def paged_attention(self, inputs: AttentionInputs, plan: AttentionPlan | None = None) -> Tensor:
        qkv, layer, keys, values, metadata = inputs
        tables, query_start, context = metadata.block_tables, metadata.query_start, metadata.context
        assert tables.dtype == query_start.dtype == context.dtype == torch.int32 and qkv.is_contiguous()
        assert layer.sinks is None or layer.sinks.dtype == torch.float32
        y = torch.empty(len(qkv), layer.q_heads * layer.value_dim)
        self.library.ember_attention(
            qkv.data_ptr(), keys.data_ptr(), None if layer.latent_dim else values.data_ptr(), _is_float32_cache(keys),
            keys.stride(0), values.stride(0), tables.data_ptr(), tables.stride(0), query_start.data_ptr(),
            context.data_ptr(), len(context), layer.scale, layer.window, layer.chunked, layer.q_heads, layer.kv_heads,
            layer.head_dim, values.shape[2], layer.softcap, _address(layer.sinks), layer.latent_dim, y.data_ptr(),
        )  # fmt: skip
        return y

    def run_dense_layers(
        self, x: Tensor, stack: DenseStack, keys: Tensor, values: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        """Run all layers of the stack in one native call, without returning to Python between ops."""
        first, (tokens, hidden), m = stack.layers[0], x.shape, metadata
        if first.o.weight.layout < 0:
            return super().run_dense_layers(x, stack, keys, values, metadata, rows)
        assert m.positions.dtype == m.block_tables.dtype == m.query_start.dtype == m.context.dtype == torch.int32
        assert m.slots.dtype == rows.dtype == torch.int64 and x.is_contiguous() and hidden == first.qkv.weight.k
        assert len(keys) == len(values) == len(stack.layers)
        size, attention, cos_sin = keys.element_size(), first.attention, first.attention.cos_sin
        step = NativeStep(
            cos_sin.data_ptr(), m.positions.data_ptr(), m.slots.data_ptr(), m.block_tables.data_ptr(),
            m.query_start.data_ptr(), m.context.data_ptr(), rows.data_ptr(), keys.data_ptr(), values.data_ptr(),
            keys.stride(0) * size, values.stride(0) * size, keys.stride(1), values.stride(1), len(rows), tokens,
            len(m.context), m.block_tables.stride(0), _is_float32_cache(keys[0]), cos_sin.shape[1], values.shape[3],
            hidden, first.gate_up.weight.n // 2, attention.q_heads, attention.kv_heads, attention.head_dim,
            first.qkv.eps, attention.scale,
        )  # fmt: skip
        y = torch.empty(len(rows), hidden)
        self.library.ember_stack(ctypes.byref(step), stack.native, len(stack.layers), x.data_ptr(), y.data_ptr())
        return y

    def run_mixture(self, x: Tensor, mixture: Mixture, out: Tensor | None = None) -> Tensor:
        if mixture.router.layout < 0 or isinstance(mixture.experts, StackedExperts):
            return super().run_mixture(x, mixture, out)
        out = x if out is None else out
        assert x.is_contiguous() and out.is_contiguous() and x.shape == out.shape and x.shape[1] == mixture.router.k
        self.library.ember_mixture(ctypes.byref(mixture.native), len(x), x.data_ptr(), out.data_ptr())
        return out

    def select_experts(self, x: Tensor, mixture: Mixture) -> SelectedExperts:
        if mixture.router.layout < 0 or isinstance(mixture.experts, StackedExperts):
            return super().select_experts(x, mixture)
        assert x.is_contiguous() and x.dtype == torch.float32 and x.shape[1] == mixture.router.k
        shape = len(x), mixture.routing.experts_per_row
        found = SelectedExperts(torch.empty_like(x), torch.empty(shape), torch.empty(shape, dtype=torch.int32))
        pointers = (each.data_ptr() for each in (x, *found))
        self.library.ember_select_experts(ctypes.byref(mixture.native), len(x), *pointers)
        return found

    def run_experts(self, x: Tensor, experts: Tensor, mixture: Mixture) -> Tensor:
        if mixture.router.layout < 0 or isinstance(mixture.experts, StackedExperts):
            return super().run_experts(x, experts, mixture)
        assert x.is_contiguous() and x.dtype == torch.float32 and experts.is_contiguous() and len(experts) == len(x)
        assert experts.dtype == torch.int32
        out = torch.empty_like(x)
        pointers = (each.data_ptr() for each in (x, experts, out))
        self.library.ember_experts(ctypes.byref(mixture.native), len(x), *pointers)
        return out

    def add_shared_expert(self, out: Tensor, normed: Tensor, mixture: Mixture) -> Tensor:
        if mixture.router.layout < 0 or isinstance(mixture.experts, StackedExperts):
            return super().add_shared_expert(out, normed, mixture)
        assert mixture.shared is not None and normed.is_contiguous() and out.is_contiguous()
        self.library.ember_shared_expert(ctypes.byref(mixture.native), len(normed), normed.data_ptr(), out.data_ptr())
        return out

    def convolve(self, x: Tensor, layer: DeltaLayer, states: LayerStates) -> Tensor:
        assert x.stride(1) == 1 and x.dtype == states.conv.dtype == torch.float32 and states.conv.is_contiguous()
        y = torch.empty(len(x), layer.channels)
        arguments = NativeConvolution(
            _sequences(states), x.data_ptr(), layer.conv_weight.data_ptr(), states.conv.data_ptr(), y.data_ptr(),
            _address(states.drafts and states.drafts.conv), x.stride(0), len(layer.conv_weight), layer.channels,
        )  # fmt: skip
        self.library.ember_convolution(ctypes.byref(arguments))
        return y

    def compute_delta_rule(self, mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates) -> Tensor:
        steps, times = gates
        assert mixed.is_contiguous() and mixed.shape[1] == layer.channels and states.matrices.is_contiguous()
        assert steps.stride() == times.stride() and steps.stride(1) == 1
        out, scratch = torch.empty(len(mixed), layer.values), torch.empty(len(mixed), 2 * layer.value_heads)
        arguments = NativeDeltaRule(
            _sequences(states), mixed.data_ptr(), steps.data_ptr(), times.data_ptr(), layer.rates.data_ptr(),
            layer.time_bias.data_ptr(), states.matrices.data_ptr(), scratch.data_ptr(), out.data_ptr(),
            _address(states.drafts and states.drafts.rule), steps.stride(0),
            layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim,
        )  # fmt: skip
        self.library.ember_delta_rule(ctypes.byref(arguments))
        return out

    def norm_and_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous() and gate.shape == x.shape and gate.stride(1) == 1
        (rows, columns), width = x.shape, len(weight)
        self.library.ember_gated_norm(
            x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), eps, rows, columns // width, width
        )
        return x

    def apply_sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        assert x.is_contiguous() and gate.is_contiguous() and x.shape == gate.shape
        self.library.ember_sigmoid_gate(x.data_ptr(), gate.data_ptr(), *x.shape)
        return x

    def sample(self, logits: Tensor, settings: SamplingTensors, uniform: Tensor) -> Tensor:
        temperature, top_k, top_p, min_p = settings
        assert top_k.dtype == torch.int32 and uniform.dtype == torch.float64 and logits.is_contiguous()
        assert temperature.dtype == top_p.dtype == min_p.dtype == torch.float32
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self.library.ember_sample(
            logits.data_ptr(), rows, n, temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
            uniform.data_ptr(), ids.data_ptr(),
        )  # fmt: skip
        return ids

    def log_probs(self, logits: Tensor, ids: Tensor, top_n: int) -> LogProbs:
        assert logits.is_contiguous() and ids.dtype == torch.int64
        rows, n = logits.shape
        chosen, top = torch.empty(rows), torch.empty(rows, top_n)
        top_ids, rank = torch.empty(rows, top_n, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        self.library.ember_log_probs(
            logits.data_ptr(), rows, n, ids.data_ptr(), top_n, chosen.data_ptr(), top_ids.data_ptr(), top.data_ptr(),
            rank.data_ptr(),
        )  # fmt: skip
        return LogProbs(chosen, top_ids, top, rank)

    def apply_bitmask(self, logits: Tensor, mask: Tensor, rows: Tensor) -> None:
        assert mask.dtype == torch.int32 and mask.is_contiguous() and rows.dtype == torch.int64
        assert logits.is_contiguous()
        words = mask.shape[1]
        self.library.ember_bitmask(
            logits.data_ptr(), logits.shape[1], mask.data_ptr(), words, rows.data_ptr(), len(rows)
        )


def _check_or_allocate_output(out: Tensor | None, rows: int, columns: int) -> Tensor:
    if out is None:
        return torch.empty(rows, columns)
    assert out.shape == (rows, columns) and out.is_contiguous() and out.dtype == torch.float32
    return out


def _sequences(states: LayerStates) -> NativeSequences:
    saves, drafts = states.saves or (None, None), states.drafts
    places, max_draft = (None, None, None) if drafts is None else drafts[2:5], 0
    if drafts is not None:
        assert drafts.conv.is_contiguous() and drafts.rule.is_contiguous()
        max_draft = drafts.conv.shape[1]
    tensors = states.metadata.query_start, states.metadata.context, states.slots, *saves, *places
    assert all(tensor is None or (tensor.dtype == torch.int32 and tensor.is_contiguous()) for tensor in tensors)
    return NativeSequences(*map(_address, tensors), len(states.slots), max_draft)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_float32_cache(cache: Tensor) -> bool:
    _, _, size, dim = cache.shape
    assert cache.stride()[1:] == (size * dim, dim, 1)
    assert size >= 8 and (64 % size == 0 or size % 64 == 0)
    assert cache.dtype in (torch.bfloat16, torch.float32)
    return cache.dtype == torch.float32
