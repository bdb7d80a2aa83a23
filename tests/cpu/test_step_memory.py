"""What layers allocate on a GPU, measured with tensors without memory and kernels that are not launched, is planned.

The sizes are those of Llama 8B and Qwen3-30B-A3B, so the measured numbers are those of real steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from meta_kernels import BLOCK, Form, make_weight, use_meta_kernels
from tensor_peak import measure_peak

from emberline.bench.gpu.model import LLAMA_8B
from emberline.engine.gpu.device import HostDevice
from emberline.engine.step_peak import layer_bytes, unpacked_bytes
from emberline.engine.step_sizes import StepSizes
from emberline.kernels import ops, work_limits
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.kernels.cuda.narrow_layout import FourBitWeight
from emberline.kernels.cuda.uw12 import UNIT_BYTES, UW12Weight
from emberline.kernels.four_bit_size import count_packed_bytes
from emberline.kernels.mixture import Expert, Mixture, Routing, SharedExpert, StackedExperts
from emberline.kernels.packed_weight import PackedExperts, PackedWeight, WeightLayout
from emberline.kernels.portable_backend import PortableBackend
from emberline.kernels.step_memory import ExpertNetwork, GatedNetwork, StepKernels
from emberline.models.attention import Attention
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.decoder import DecoderLayer
from emberline.models.ffn import FeedForward
from emberline.models.fused_layer import FusedLayer
from emberline.models.layers import OutputScaling
from emberline.models.moe import SparseFeedForward

H, F, QKV, TOKENS = 4096, 14336, 6144, 32768
NETWORK = GatedNetwork(H, F)
SIZES = StepSizes.from_outline(outline_of(ModelConfig.from_hf(LLAMA_8B)), 128256)
FORMS: tuple[Form, ...] = ("plain", "packed", "fp8", "fp8 blocks", "int4")
QUANTISED = {
    "fp8": [("fp8", 2 * F, H, H)],
    "fp8 blocks": [("fp8", 2 * F, H, BLOCK)],
    "int4": [("int4", 2 * F, H, BLOCK)],
}


def kernels_of(kernels: str, form: Form) -> StepKernels:
    return StepKernels.for_weights(kernels, 2, packed=form == "packed", quantised=QUANTISED.get(form, ()))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def make_layer(backend: PortableBackend, form: Form) -> DecoderLayer:
    def linear(n: int, k: int, *, normed: bool = False, gated: bool = False) -> ops.LinearLayer:
        norm = empty(k, dtype=torch.float32) if normed else None
        return ops.LinearLayer(make_weight(backend, form, n, k, gated=gated), norm=norm, eps=1e-5)

    layer = ops.AttentionLayer(32, 8, 128, 1.0, empty(TOKENS, 128, dtype=torch.float32))
    attention = Attention(linear(QKV, H, normed=True), linear(H, H), layer)
    return DecoderLayer(attention, FeedForward(linear(2 * F, H, normed=True, gated=True), linear(H, F)))


def make_batch(unpacker: ops.WeightUnpacker | None) -> Any:
    names = ("positions", "slots", "query_start", "context", "block_tables")
    metadata = ops.AttentionMetadata(**{name: empty(8, 8, dtype=torch.int32) for name in names})
    return SimpleNamespace(attention=metadata, plan=AttentionPlan(0), unpacker=unpacker, exchange_of=lambda rows: None)


def make_unpacker(layer: DecoderLayer) -> ops.WeightUnpacker:
    attention, ffn = cast("Attention", layer.attention), cast("FeedForward", layer.ffn)
    weights = [each.weight for each in (attention.qkv, attention.o, ffn.gate_up, ffn.down)]
    stream = HostDevice().step_stream
    return ops.WeightUnpacker(weights, len(weights), stream, stream)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", ["hopper", "portable"])
@pytest.mark.parametrize("rows", [TOKENS, TOKENS + 128, 1023, 65])
def test_a_layer_allocates_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, kernels: str, form: Form, rows: int
) -> None:
    """Never more than the plan, and for the rows of the largest step at most 2 % less."""
    if kernels == "hopper" and form.startswith("fp8") and rows > TOKENS:
        return  # the kernels do not support it
    backend = use_meta_kernels(monkeypatch, kernels)
    layer = make_layer(backend, form)
    unpacker = make_unpacker(layer)
    cache, batch = empty(1, 8, 64, 128), make_batch(unpacker.begin_step())
    measured = measure_peak(lambda: layer(empty(rows, H), cache, cache, batch))
    counted = kernels_of(kernels, form)
    few = 2048  # rows of the largest captured step
    planned = layer_bytes(SIZES, counted, rows, few) + unpacked_bytes(SIZES, counted)
    assert measured <= planned
    if rows >= TOKENS:
        head = 2 * 8192 * 4096 if form == "packed" else 0  # a part of the output head, which this is not
        assert measured >= 0.98 * (planned - head)


class FusingRank(LoneRank):
    fuses_norm = True


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [LoneRank(0, 2), FusingRank(0, 2)])
def test_a_layer_of_a_rank_allocates_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, rank: LoneRank, form: Form
) -> None:
    """Also if sums of ranks compute norms, so that a layer's input and its norm are kept while it is computed."""
    layer = make_layer(use_meta_kernels(monkeypatch, "hopper"), form)
    scaling = OutputScaling(None, 1e-5, 1.0, rank)
    attention = replace(cast("Attention", layer.attention), scaling=scaling)
    ffn = replace(cast("FeedForward", layer.ffn), scaling=scaling)
    unpacker, cache = make_unpacker(layer), empty(1, 8, 64, 128)
    batch = make_batch(unpacker.begin_step())

    def run() -> None:
        x = empty(TOKENS, H)
        if (fused := FusedLayer.make_if_supported(attention, ffn)) is None:
            DecoderLayer(attention, ffn)(x, cache, cache, batch)
        else:
            fused.run(x, empty(TOKENS, H), cache, cache, batch, None, fused)

    counted = kernels_of("hopper", form)
    planned = layer_bytes(SIZES, counted, TOKENS, 2048, has_ranks=True) + unpacked_bytes(SIZES, counted)
    measured = measure_peak(run)
    assert measured <= planned and (not rank.fuses_norm or measured >= 0.75 * planned)


@pytest.mark.parametrize(
    ("kernels", "form", "bytes_per_row"),
    [
        ("hopper", "plain", 2 * (H + F)),  # normed rows and activations
        ("hopper", "packed", 2 * (H + F)),
        ("hopper", "int4", 2 * (H + F)),
        ("hopper", "fp8", 2 * F + F + 4 * 112),  # activations, and these in float8 with a scale for 128 columns
        ("portable", "plain", 2 * (H + 3 * F)),  # gates, ups, and the activations of both
        ("portable", "packed", 2 * (H + 3 * F)),
        ("portable", "fp8", 2 * (H + 3 * F)),
        ("portable", "int4", 2 * (H + 3 * F)),
        ("", "plain", 2 * (H + 3 * F)),  # not known: enough for both
    ],
)
def test_feed_forward_networks(kernels: str, form: Form, bytes_per_row: int) -> None:
    found = kernels_of(kernels, form)
    assert found.gated_bytes(NETWORK, TOKENS, 2048) == TOKENS * bytes_per_row
    assert found.gated_bytes(GatedNetwork(H, F, has_silu=False), 256, 256) >= 2 * 256 * 3 * F
    assert found.gated_bytes(GatedNetwork(H, F, has_biases=True), 256, 256) >= 2 * 256 * 4 * F


def test_gates_are_stored_where_no_kernel_avoids_it() -> None:
    """Few rows, for which cuBLAS may be faster; more rows than our kernel computes; shapes and dtypes that it lacks."""
    hopper = kernels_of("hopper", "plain")
    stored = 2 * (H + 3 * F)
    assert hopper.gated_bytes(NETWORK, 2048, 2048) == 2048 * stored
    assert hopper.gated_bytes(NETWORK, 2049, 2048) == 2048 * stored
    assert hopper.gated_bytes(NETWORK, TOKENS + 1, 2048) == (TOKENS + 1) * stored
    assert hopper.gated_bytes(GatedNetwork(H, F + 8), TOKENS, 2048) == TOKENS * 2 * (H + 3 * (F + 8))
    wide = StepKernels.for_weights("hopper", 4)
    assert wide.gated_bytes(NETWORK, TOKENS, 2048) == TOKENS * 4 * (H + 3 * F)
    odd = StepKernels.for_weights(
        "hopper", 2, quantised=[("fp8", 2 * F, H, 64)]
    )  # groups that quantised inputs do not fit
    assert odd.gated_bytes(NETWORK, TOKENS, 2048) == TOKENS * stored


def test_unpacked_matrices_are_counted() -> None:
    """Two matrices of a layer, and a part of a packed head, or of a matrix that is dequantised in parts."""
    part, two = 2 * 8192 * 4096, 2 * 2 * 2 * F * H
    expected = {
        ("hopper", "plain"): 0,
        ("hopper", "packed"): two + part,
        ("portable", "packed"): two + part,
        ("hopper", "fp8"): 0,
        ("portable", "fp8"): part,
        ("hopper", "int4"): two,
        ("portable", "int4"): part,
        ("", "int4"): two + part,
    }
    for (kernels, form), size in expected.items():
        assert unpacked_bytes(SIZES, kernels_of(kernels, cast("Form", form))) == size, (kernels, form)


HIDDEN, WIDTH, COUNT, CHOSEN = 2048, 768, 128, 8  # of Qwen3-30B-A3B
GROUPS = {"int4": 128, "mxfp4": 32}  # columns that share a scale
EXPERT_FORMS = [
    ("hopper", "plain"), ("hopper", "packed"), ("hopper", "int4"), ("hopper", "mxfp4"), ("portable", "plain"),
]  # fmt: skip


def make_experts(form: Form, n: int, k: int, *, gated: bool) -> Tensor | PackedExperts:
    if form == "plain":
        return empty(COUNT, n, k)
    if form in GROUPS:
        units, size = k // 128, count_packed_bytes(form, n, k, GROUPS[form])
        data = empty(COUNT, n // 64, units, 4, size // (n // 16 * units), dtype=torch.uint8)
        name = "Int4<1, false>" if form == "int4" else "Float4<4>"
        weight: Any = FourBitWeight(data, name, n, k, 1.0, None, None, gated)
        return PackedExperts(COUNT, n, k, WeightLayout.QUANTISED, weight, data.nbytes, gated)
    planes = empty(COUNT * n // 64, k // 64, 4, UNIT_BYTES, dtype=torch.uint8)
    weight = UW12Weight(planes, empty(COUNT * n // 16, 512, dtype=torch.uint8), COUNT * n, k)
    return PackedExperts(COUNT, n, k, WeightLayout.UW12, weight, planes.nbytes, gated)


def make_mixture(backend: PortableBackend, form: Form, shared: int) -> Mixture:
    def pack(n: int, k: int, *, gated: bool = False) -> PackedWeight:
        return make_weight(backend, "plain", n, k, gated=gated)

    extra = SharedExpert(Expert(pack(2 * shared, HIDDEN, gated=True), pack(HIDDEN, shared)), scale=0.5)
    gate_up, down = make_experts(form, 2 * WIDTH, HIDDEN, gated=True), make_experts(form, HIDDEN, WIDTH, gated=False)
    return Mixture(
        norm=empty(HIDDEN, dtype=torch.float32),
        eps=1e-5,
        router=pack(COUNT, HIDDEN),
        experts=StackedExperts(gate_up, down),
        routing=Routing(CHOSEN, renormalize=True),
        shared=extra if shared else None,
    )


def plan_experts(kernels: str, form: Form) -> StepKernels:
    quantised = [(form, 2 * WIDTH, HIDDEN, GROUPS[form])] if form in GROUPS else []
    forms: Any = {"quantised_experts": quantised, "has_other_experts": not quantised}
    return StepKernels.for_weights(kernels, 2, packed=form == "packed", **forms)


def describe_experts(shared: int = 0) -> ExpertNetwork:
    return ExpertNetwork(HIDDEN, WIDTH, COUNT, CHOSEN, GatedNetwork(HIDDEN, shared) if shared else None)


@pytest.mark.parametrize("shared", [0, 1408])
@pytest.mark.parametrize("rows", [8192, 5120, 1100, 520, 300, 200, 129, 40])
@pytest.mark.parametrize(("kernels", "form"), EXPERT_FORMS)
def test_experts_allocate_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, kernels: str, form: Form, rows: int, shared: int
) -> None:
    """Never more than the plan, and at most a tenth less where the largest tiles are used."""
    backend = use_meta_kernels(monkeypatch, kernels)
    mixture, x = make_mixture(backend, form, shared), empty(rows, HIDDEN)
    measured = measure_peak(lambda: ops.run_mixture(x, mixture))
    planned = plan_experts(kernels, form).expert_bytes(describe_experts(shared), rows, 2048)
    assert measured <= planned
    if rows == 5120 or (rows == 8192 and (kernels, form) != ("hopper", "plain")):
        assert measured >= 0.9 * planned


@pytest.mark.parametrize("form", ["plain", "int4"])
def test_experts_of_a_rank_allocate_what_is_planned(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    """Their outputs are added to zeros, and summed before they are added to the state."""
    mixture = make_mixture(use_meta_kernels(monkeypatch, "hopper"), form, 0)
    network = SparseFeedForward(mixture, LoneRank(0, 2))
    measured = measure_peak(lambda: network(empty(8192, HIDDEN)))
    sizes = replace(SIZES, hidden=HIDDEN, networks=frozenset([describe_experts()]))
    assert 0.6 * (planned := layer_bytes(sizes, plan_experts("hopper", form), 8192, 2048, has_ranks=True)) <= measured
    assert measured <= planned


@pytest.mark.parametrize(("kernels", "form"), EXPERT_FORMS)
def test_experts_of_more_rows_allocate_no_more(monkeypatch: pytest.MonkeyPatch, kernels: str, form: Form) -> None:
    """Rows beyond those of a pass are computed in further passes."""
    monkeypatch.setattr(work_limits, "MIN_EXPERT_PAIRS", 4096 * CHOSEN)
    monkeypatch.setattr(work_limits, "PAIRS_PER_EXPERT", 1)
    mixture = make_mixture(use_meta_kernels(monkeypatch, kernels), form, 1408)
    planned, one = plan_experts(kernels, form).expert_bytes(describe_experts(1408), 1 << 20, 2048), empty(4096, HIDDEN)
    of_pass = measure_peak(lambda: ops.run_mixture(one, mixture))
    for rows in (8192, 10_000, 3 * 4096 + 1):
        x = empty(rows, HIDDEN)
        assert measure_peak(lambda x=x: ops.run_mixture(x, mixture)) <= of_pass <= planned


def test_experts_by_hand() -> None:
    """Rows that are sorted by expert take a place in a tile of 256 rows, and each expert may have unused places."""
    network, rows = describe_experts(), 8192
    normed = rows * (2 * HIDDEN + 4 * COUNT)
    unused = COUNT * 255
    tables = 24 * (rows * CHOSEN + unused)
    outputs = 2 * rows * CHOSEN * (WIDTH + HIDDEN)
    assert StepKernels.for_weights("portable", 2).expert_bytes(network, rows, 2048) == normed + outputs + tables
    few = 320 * COUNT + unused
    sorted_rows = few * (2 * (WIDTH + HIDDEN) + 24)
    assert sorted_rows > outputs + tables
    assert StepKernels.for_weights("hopper", 2).expert_bytes(network, rows, 2048) == normed + sorted_rows
    places = rows * CHOSEN + unused
    packed = StepKernels.for_weights("hopper", 2, packed=True)
    assert packed.expert_bytes(network, rows, 2048) == normed + places * (2 * (WIDTH + HIDDEN) + 24)
    # 4-bit codes: with tiles of 128 rows, inputs are copied into 24,576 places at a time, and outputs need none.
    places = rows * CHOSEN + COUNT * 127
    quantised = plan_experts("hopper", "int4")
    stored = places * (2 * WIDTH + 24) + 2 * rows * CHOSEN * HIDDEN
    assert quantised.expert_bytes(network, rows, 2048) == normed + stored


def test_only_dense_matrices_are_unpacked() -> None:
    """Kernels of experts decode codes in registers, whatever the number of rows."""
    assert unpacked_bytes(SIZES, plan_experts("hopper", "int4")) == 0
    assert unpacked_bytes(SIZES, plan_experts("portable", "int4")) == 0
