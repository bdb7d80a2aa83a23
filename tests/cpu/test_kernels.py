"""CPU kernels give the results of plain torch, and the same bits in any batch and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from native_backend import native_backend
from rope_metadata import rope_metadata
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.arguments import AttentionInputs, AttentionLayer, AttentionMetadata, LinearLayer
from emberline.kernels.mixture import Expert, Mixture, Routing
from emberline.kernels.op_backend import OpBackend
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.reference import ReferenceBackend, rms_norm
from emberline.kernels.sampling_arguments import SamplingTensors

REFERENCE = ReferenceBackend()
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    with native_backend():
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_close(ours: Tensor, torch32: Tensor, exact: Tensor) -> None:
    """Assert that the error is at most twice that of torch, in the worst element and on average."""
    scale = exact.abs().max().item()
    for norm in (torch.max, torch.mean):
        mine, theirs = (norm((y.double() - exact).abs()).item() for y in (ours, torch32))
        assert mine <= 2 * theirs + 1e-7 * scale, f"{norm.__name__}: ours {mine:.3e}, torch {theirs:.3e}"


def torch_linear(x: Tensor, weight: Tensor, layout: WeightLayout) -> Tensor:
    """Return the product in the kernel's arithmetic: AMX rounds inputs to bf16, as torch's bf16 product does."""
    if layout is WeightLayout.BF16_TILES:
        return torch.nn.functional.linear(x.to(BF16), weight).float()
    return torch.nn.functional.linear(x, weight.float())


SHAPES = [(1, 576, 576), (2, 960, 576), (3, 33, 70), (5, 100, 129), (8, 64, 1536), (9, 17, 31), (61, 200, 576)]
SHAPES += [(130, 49, 2048), (1050, 300, 70)]


@pytest.mark.parametrize("m,n,k", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_linear(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias, rest = torch.randn(m, k), torch.randn(n, k).to(dtype), torch.randn(n), torch.randn(m, n)
    packed = ops.pack_linear(weight)
    theirs = torch_linear(x, weight, packed.layout)
    exact = x.double() @ weight.double().T
    assert_close(ops.linear(x, LinearLayer(packed)), theirs, exact)
    assert_close(ops.linear(x, LinearLayer(packed, bias)), theirs + bias, exact + bias.double())
    target = rest.clone()
    assert ops.linear(x, LinearLayer(packed), add_to=target) is target
    assert_close(target, rest + theirs, rest.double() + exact)


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_float16_weights_give_the_bits_of_float32_weights(m: int, n: int, k: int) -> None:
    x, weight, norm = torch.randn(m, k), torch.randn(2 * n, k).to(F16), torch.rand(k) + 0.5
    weight[0, :3] = torch.tensor([2.0**-24, -65504.0, -(2.0**-14)])  # the extremes, and a subnormal number
    for gated, op in ((False, ops.linear), (True, ops.gate_up_silu)):
        half, wide = (ops.pack_linear(w, gated=gated) for w in (weight, weight.float()))
        assert half.layout is WeightLayout.F16 and half.data.nbytes * 2 == wide.data.nbytes
        ours, expected = (op(x, LinearLayer(w, norm=norm, eps=1e-5)) for w in (half, wide))
        assert torch.equal(ours, expected)


def test_every_float16_number_is_widened_exactly() -> None:
    table = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(F16).view(-1, 1).repeat(1, 8)
    ids = torch.arange(len(table))
    for source in (table, ops.pack_linear(table)):
        assert torch.equal(ops.embed(ids, source).nan_to_num(7.0, 1e9, -1e9), table.float().nan_to_num(7.0, 1e9, -1e9))


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_norm_and_gate(m: int, n: int, k: int) -> None:
    x, norm = torch.randn(m, k), torch.rand(k) + 0.5
    weight = (torch.randn(2 * n, k) / k**0.5).to(BF16)
    packed = ops.pack_linear(weight, gated=True)
    gate, up = torch_linear(rms_norm(x, norm, 1e-5), weight, packed.layout).chunk(2, dim=-1)
    double = LinearLayer(pack_as_double(weight, gated=True), norm=norm.double(), eps=1e-5)
    exact = REFERENCE.gate_up_silu(x.double(), double)
    ours = ops.gate_up_silu(x, LinearLayer(packed, norm=norm, eps=1e-5))
    assert_close(ours, torch.nn.functional.silu(gate) * up, exact)
    exact = REFERENCE.gate_up_gelu(x.double(), double)
    ours = ops.gate_up_gelu(x, LinearLayer(packed, norm=norm, eps=1e-5))
    assert_close(ours, torch.nn.functional.gelu(gate, approximate="tanh") * up, exact)


@pytest.mark.parametrize("groups", [1, 3])
def test_norms_and_soft_cap(groups: int) -> None:
    wide, weight = torch.randn(37, 300) * 3 + 1, torch.rand(groups, 40) + 0.5
    x, whole = wide[:, 10 : 10 + 40 * groups], weight.flatten()
    for norm, w in (("rms_norm", whole), ("layer_norm", weight if groups > 1 else whole)):
        theirs, exact = (
            getattr(REFERENCE, norm)(x.to(t), w.to(t), 1e-5, torch.empty(x.shape, dtype=t))
            for t in (torch.float32, torch.float64)
        )
        out = torch.full((37, 300), torch.nan)
        ours = getattr(ops, norm)(x, w, 1e-5, out[:, 3 : 3 + 40 * groups])
        assert_close(ours, theirs, exact)
        assert int(out.isnan().sum()) == out.numel() - x.numel()
        inside = wide.clone()[:, 10 : 10 + 40 * groups]
        assert torch.equal(getattr(ops, norm)(inside, w, 1e-5, inside), ours)
        assert torch.equal(getattr(ops, norm)(x[5:6], w, 1e-5, torch.empty_like(x[5:6])), ours[5:6])
    for scale in (0.001, 0.3, 1.0, 100.0):
        values = torch.randn(1003) * 20 * scale
        exact = 20 * (values.double() / 20).tanh()
        assert_close(ops.soft_cap(values.clone(), 20.0), 20 * (values / 20).tanh(), exact)
        assert torch.equal(ops.soft_cap(values[1:].clone(), 20.0), ops.soft_cap(values.clone(), 20.0)[1:])


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_bf16_inputs_are_rounded_at_most_once(m: int, n: int, k: int) -> None:
    x, weight = torch.randn(m, k), torch.randn(n, k).to(BF16)
    layer = LinearLayer(ops.pack_linear(weight))
    rounded = x.to(BF16).float()
    ours = ops.linear(rounded, layer)
    assert_close(ours, torch.nn.functional.linear(rounded, weight.float()), rounded.double() @ weight.double().T)
    assert torch.equal(ops.linear(x, layer), ours) == (layer.weight.layout is WeightLayout.BF16_TILES)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("k", [576, 1536, 1024, 4096, 77])
def test_linear_rows_are_independent(dtype: torch.dtype, k: int) -> None:
    x, norm = torch.randn(67, k), torch.rand(k)
    packed = ops.pack_linear(torch.randn(50, k).to(dtype))
    gated = ops.pack_linear(torch.randn(52, k).to(dtype), gated=True)
    runs: list[Callable[[Tensor], Tensor]] = [
        lambda x: ops.linear(x, LinearLayer(packed)),
        lambda x: ops.linear(x, LinearLayer(packed, norm=norm, eps=1e-6)),
        lambda x: ops.gate_up_silu(x, LinearLayer(gated, norm=norm, eps=1e-6)),
        lambda x: ops.gate_up_gelu(x, LinearLayer(gated, norm=norm, eps=1e-6)),
    ]
    for run in runs:
        ops.set_threads(2)
        whole = run(x)
        for start, stop in [(0, 1), (1, 3), (3, 7), (7, 15), (15, 31), (31, 67), (66, 67)]:
            assert torch.equal(run(x[start:stop]), whole[start:stop])
        ops.set_threads(1)
        assert torch.equal(run(x), whole)


def pack_as_double(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    return PackedWeight(weight.double(), *weight.shape, weight.dtype, gated=gated)


def mixture(
    pack: Callable[..., PackedWeight], dtype: torch.dtype, chosen: int = 3, *, renormalised: bool = True
) -> Mixture:
    """Return a mixture whose experts 1 and 5 are equally probable."""
    torch.manual_seed(1)
    hidden, ffn, count = 72, 40, 7
    router, norm = torch.randn(count, hidden) / 4, torch.rand(hidden) + 0.5
    router[5] = router[1]

    def expert() -> Expert:
        gate_up, down = torch.randn(2 * ffn, hidden) / 8, torch.randn(hidden, ffn) / 6
        return Expert(pack(gate_up.to(dtype), gated=True), pack(down.to(dtype)))

    experts = tuple(expert() for _ in range(count))
    return Mixture(norm, 1e-5, pack(router), experts, Routing(chosen, renormalised))


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("chosen", [1, 2, 3, 7])
@pytest.mark.parametrize("renormalised", [False, True])
def test_mixture(rows: int, chosen: int, renormalised: bool) -> None:
    x = torch.randn(rows, 72)
    packs = ops.pack_linear, REFERENCE.pack_linear, pack_as_double
    mixtures = [mixture(pack, F32, chosen, renormalised=renormalised) for pack in packs]
    inputs = x.clone(), x.clone(), x.double()
    ours, theirs, exact = map(ops.run_mixture, inputs, mixtures)
    assert torch.equal(REFERENCE.run_mixture(x.clone(), mixtures[1]), theirs)
    assert_close(ours, theirs, exact)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_mixture_rows_are_independent(dtype: torch.dtype) -> None:
    x, made = torch.randn(67, 72), mixture(ops.pack_linear, dtype)
    x[40] = torch.nan

    def run(x: Tensor) -> Tensor:
        return ops.run_mixture(x, made)

    ops.set_threads(2)
    whole = run(x.clone())
    for start, stop in [(0, 1), (1, 3), (3, 7), (7, 31), (31, 67), (66, 67)]:
        assert torch.equal(run(x[start:stop].clone()).nan_to_num(), whole[start:stop].nan_to_num())
    ops.set_threads(1)
    assert torch.equal(run(x.clone()).nan_to_num(), whole.nan_to_num())
    assert whole[40].isnan().all() and not whole[39].isnan().any() and not whole[41].isnan().any()


def test_embed() -> None:
    table, ids = torch.randn(1000, 72).to(BF16), torch.tensor([0, 999, 17, 17, 500] * 9)
    for dtype in (BF16, F16, F32):
        typed = table.to(dtype)
        assert torch.equal(ops.embed(ids, typed), typed[ids].float())
        assert torch.equal(ops.embed(ids, ops.pack_linear(typed)), typed[ids].float())


class PagedBatch:
    """A batch of sequences in a shuffled cache whose unused part is NaN, so that reads of it show in results."""

    def __init__(
        self, lengths: list[tuple[int, int]], heads: tuple[int, int], dim: int, dtype: torch.dtype, block: int = 16
    ) -> None:
        self.heads, self.dim, self.block, self.lengths = heads, dim, block, lengths
        q_heads, kv_heads = heads
        needed = [-(-(before + new) // block) for before, new in lengths]
        free = torch.randperm(sum(needed) + 3).split([*needed, 3])
        self.tables = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int32)
        for row, blocks in zip(self.tables, free, strict=False):
            row[: len(blocks)] = blocks
        self.k = torch.full((sum(needed) + 3, kv_heads, block, dim), torch.nan, dtype=dtype)
        self.v = self.k.clone()
        self.qkv = [torch.randn(before + new, (q_heads + 2 * kv_heads) * dim) for before, new in lengths]
        self.cos_sin = torch.randn(4096, dim)
        self.softcap = 0.0
        self.sinks: Tensor | None = None
        self.chunked = False

    def layer(self, window: int = 0) -> AttentionLayer:
        scale = self.dim**-0.5
        return AttentionLayer(
            *self.heads,
            self.dim,
            scale=scale,
            cos_sin=self.cos_sin,
            window=window,
            softcap=self.softcap,
            chunked=self.chunked,
            sinks=self.sinks,
        )

    def slots(self, b: int, start: int, stop: int) -> Tensor:
        at = torch.arange(start, stop)
        return self.tables[b, at // self.block].long() * self.block + at % self.block

    def write(self, b: int, start: int, stop: int) -> Tensor:
        part = self.qkv[b][start:stop].clone()
        positions = torch.arange(start, stop, dtype=torch.int32)
        ops.rope_and_cache(part, self.layer(), self.k, self.v, rope_metadata(positions, self.slots(b, start, stop)))
        return part

    def attend(
        self, backend: OpBackend, parts: list[tuple[int, int, Tensor]], window: int = 0, double: bool = False
    ) -> Tensor:
        """Run attention over parts: (sequence, tokens before, rotated qkv of the new tokens)."""
        counts = torch.tensor([0] + [len(part) for _, _, part in parts])
        tables = self.tables[[b for b, _, _ in parts]]
        qkv, k, v = torch.cat([part for _, _, part in parts]), self.k, self.v
        if double:
            qkv, k, v = qkv.double(), k.double(), v.double()
        context = torch.tensor([before for _, before, _ in parts], dtype=torch.int32)
        none = torch.empty(0)  # attention reads neither positions nor slots
        metadata = AttentionMetadata(none, none, counts.cumsum(0).int(), context, tables)
        return backend.paged_attention(AttentionInputs(qkv, self.layer(window), k, v, metadata))


@pytest.mark.parametrize("q_heads,kv_heads,dim", [(9, 3, 64), (4, 4, 128), (8, 1, 80), (3, 1, 20), (4, 1, 256)])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "chunked"),
    [
        (0, 0.0, False, False),
        (50, 0.0, False, False),
        (50, 3.0, False, False),
        (0, 0.0, True, False),
        (50, 3.0, True, False),
        (48, 0.0, False, True),
        (128, 0.0, True, True),
    ],
)
def test_attention(
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    window: int,
    softcap: float,
    has_sinks: bool,
    chunked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = PagedBatch([(0, 1), (70, 1), (0, 40), (63, 1), (64, 130), (300, 3)], (q_heads, kv_heads), dim, dtype)
    paged.softcap, paged.sinks, paged.chunked = softcap, torch.randn(q_heads) * 4 if has_sinks else None, chunked
    parts = []
    for b, (before, new) in enumerate(paged.lengths):
        paged.write(b, 0, before)
        parts.append((b, before, paged.write(b, before, before + new)))
    ours = paged.attend(ops.current_backend(), parts, window)
    if (
        dtype is BF16 and dim % 32 == 0 and "amx" in ops.current_backend().isa
    ):  # AMX rounds queries and weights to bf16, so torch must too
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "float", lambda self: self.bfloat16())
            theirs = paged.attend(REFERENCE, [(b, before, part.bfloat16()) for b, before, part in parts], window)
    else:
        theirs = paged.attend(REFERENCE, parts, window)
    monkeypatch.setattr(Tensor, "float", lambda self: self.double())
    assert_close(ours, theirs, paged.attend(REFERENCE, parts, window, double=True))


@pytest.mark.parametrize("block", [8, 16, 32, 128])
@pytest.mark.parametrize(
    ("window", "has_sinks", "chunked"),
    [(0, False, False), (37, False, False), (37, True, False), (48, False, True)],
)
def test_attention_is_independent_of_batch_chunks_and_threads(
    block: int, window: int, has_sinks: bool, chunked: bool
) -> None:
    paged = PagedBatch([(0, 200), (100, 1), (0, 65)], (6, 2), 64, BF16, block)
    paged.sinks, paged.chunked = torch.randn(6) if has_sinks else None, chunked
    parts = [(b, 0, paged.write(b, 0, before + new)) for b, (before, new) in enumerate(paged.lengths)]
    ops.set_threads(2)
    whole = paged.attend(ops.current_backend(), parts, window)
    ops.set_threads(1)
    assert torch.equal(paged.attend(ops.current_backend(), parts, window), whole)
    start = 0
    for b, _, part in parts:
        for cut in ([0, 1, 17, 64, 65, len(part)], list(range(len(part) - 3, len(part) + 1))):
            for i, j in pairwise(cut):
                assert torch.equal(
                    paged.attend(ops.current_backend(), [(b, i, part[i:j])], window), whole[start + i : start + j]
                )
        start += len(part)


def test_a_sink_is_a_key_without_a_value() -> None:
    """With equal scores, each of n keys gets a share of 1 / n; a sink with the same score takes one share more."""
    paged = PagedBatch([(0, 3)], (2, 1), 8, F32)
    paged.qkv[0][:, : 3 * 8] = 0.0  # queries and keys
    parts = [(0, 0, paged.write(0, 0, 3))]
    values, shares = paged.qkv[0][:, 3 * 8 :], torch.tensor([1.0, 2.0, 3.0])[:, None]
    paged.sinks = torch.tensor([0.0, -torch.inf])  # no sink on the second head
    for backend in (ops.current_backend(), REFERENCE):
        with_sink, without = paged.attend(backend, parts).split(8, dim=1)
        torch.testing.assert_close(with_sink, values.cumsum(0) / (shares + 1))
        torch.testing.assert_close(without, values.cumsum(0) / shares)


def test_chunks_are_sequences_of_their_own() -> None:
    """The tokens of a chunk give the same result as a sequence that starts with them, keys rotated alike."""
    paged = PagedBatch([(0, 40), (0, 16), (0, 16), (0, 8)], (2, 1), 8, F32)
    paged.cos_sin = torch.tensor([1.0] * 4 + [0.0] * 4).expand(4096, 8).contiguous()
    for b, start in ((1, 0), (2, 16), (3, 32)):
        paged.qkv[b] = paged.qkv[0][start : start + len(paged.qkv[b])]
    whole, *chunks = [(b, 0, paged.write(b, 0, len(qkv))) for b, qkv in enumerate(paged.qkv)]
    for backend in (ops.current_backend(), REFERENCE):
        alone = paged.attend(backend, chunks)
        paged.chunked = True
        torch.testing.assert_close(paged.attend(backend, [whole], window=16), alone, atol=1e-6, rtol=1e-6)
        paged.chunked = False


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("q_heads", "dim", "latent"), [(16, 96, 64), (3, 28, 20), (130, 40, 24)])
def test_latent_attention_equals_attention_with_copied_values(
    dtype: torch.dtype, q_heads: int, dim: int, latent: int
) -> None:
    """The values are the last elements of the keys: the same result as of a cache that has them twice."""
    lengths = [(0, 9), (70, 1), (64, 3)]
    full = PagedBatch(lengths, (q_heads, 1), dim, dtype)
    full.cos_sin = torch.randn(4096, dim - latent)
    for qkv in full.qkv:  # the rotated elements have no values
        qkv[:, -dim:] = torch.cat([torch.zeros(len(qkv), dim - latent), qkv[:, -dim - latent : -dim]], dim=1)
    keys = {backend: torch.full_like(full.k, torch.nan) for backend in (ops.current_backend(), REFERENCE)}
    expected, parts = [], []
    for b, (before, new) in enumerate(lengths):
        rotated = full.write(b, 0, before + new)
        mixed = full.attend(REFERENCE, [(b, before, rotated[before:])])
        expected.append(mixed.view(new, q_heads, dim)[..., -latent:].flatten(1))
        parts.append((b, before, full.qkv[b][:, :-dim]))
    for backend, cached in keys.items():
        layer = replace(full.layer(), latent_dim=latent)
        no_values = cached[..., :0]
        for (b, before, qkv), wanted in zip(parts, expected, strict=True):
            part, count = qkv.clone(), len(qkv)
            positions, slots = torch.arange(count, dtype=torch.int32), full.slots(b, 0, count)
            backend.rope_and_cache(part, layer, cached, no_values, rope_metadata(positions, slots))
            starts, context = (torch.tensor(n, dtype=torch.int32) for n in ([0, count - before], [before]))
            metadata = AttentionMetadata(positions, slots, starts, context, full.tables[b : b + 1])
            new = part[before:].contiguous()
            got = backend.paged_attention(AttentionInputs(new, layer, cached, no_values, metadata))
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("tokens", "wanted"), [((1, 1), [0, 1]), ((20, 7), [26, 19]), ((3, 0), [])])
def test_dense_stack_equals_its_ops(tokens: tuple[int, int], wanted: list[int]) -> None:
    dim, hidden, ffn = 16, 40, 56
    shapes = {"qkv": (8 * dim, hidden), "o": (hidden, 4 * dim), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}
    results, rows = [], torch.tensor(wanted, dtype=torch.int64)
    native = ops.current_backend()
    for run in (native.run_dense_layers, partial(OpBackend.run_dense_layers, native)):  # the definition: one by one
        torch.manual_seed(1)
        layers, cos_sin = [], torch.randn(64, dim)
        for window in (0, 5):
            w = {n: ops.pack_linear(torch.randn(s).to(BF16), gated=n == "gate_up") for n, s in shapes.items()}
            layers.append(
                ops.DenseLayer(
                    AttentionLayer(4, 2, dim, 0.25, cos_sin, window, q_norm=torch.rand(dim), eps=1e-5),
                    qkv=LinearLayer(w["qkv"], torch.randn(8 * dim), torch.rand(hidden), 1e-5),
                    o=LinearLayer(w["o"]),
                    gate_up=LinearLayer(w["gate_up"], norm=torch.rand(hidden), eps=1e-5),
                    down=LinearLayer(w["down"]),
                )
            )
        tables = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
        at = [torch.arange(9, 9 + n) for n in tokens]
        slots = torch.cat([table[p // 16].long() * 16 + p % 16 for table, p in zip(tables, at, strict=True)])
        starts = torch.tensor([0, tokens[0], sum(tokens)], dtype=torch.int32)
        x = torch.randn(sum(tokens), hidden)
        keys, values = torch.zeros(2, 2, 9, 2, 16, dim)
        context = torch.tensor([9, 9], dtype=torch.int32)
        metadata = AttentionMetadata(torch.cat(at).int(), slots, starts, context, tables)
        y = run(x, ops.DenseStack(layers), keys, values, metadata, rows)
        results.append([y, keys, values])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rotary", "interleaved"), [(64, False), (32, False), (0, False), (64, True), (32, True)])
def test_rope_and_cache(dtype: torch.dtype, normed: bool, rotary: int, interleaved: bool) -> None:
    tokens, heads, dim = 21, (6, 2), 64
    slots = torch.randperm(40)[:tokens]
    slots[3] = -1
    norms = {"q_norm": torch.rand(dim), "k_norm": torch.rand(dim), "eps": 1e-6} if normed else {}
    qkv, cos_sin, positions = torch.randn(tokens, 10 * dim), torch.randn(99, rotary), torch.randint(99, (tokens,)).int()
    layer = AttentionLayer(*heads, dim, scale=1.0, cos_sin=cos_sin, interleaved=interleaved, **norms)
    results = []
    for backend in (ops.current_backend(), REFERENCE):
        got, both = qkv.clone(), torch.full((5, 2, 2, 8, dim), 7.0).to(dtype)  # K and V interleaved, so strided
        backend.rope_and_cache(got, layer, both[:, 0], both[:, 1], rope_metadata(positions, slots))
        results.append((got[:, : 6 * dim], both))
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype is BF16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], **tolerance)
    if interleaved and not normed:  # the same rotation as of halves, with the dimensions in another order
        order = torch.cat([torch.arange(rotary).view(-1, 2).T.flatten(), torch.arange(rotary, dim)])
        split = qkv.view(tokens, 10, dim)[..., order].reshape(qkv.shape)
        halves = replace(layer, interleaved=False)
        REFERENCE.rope_and_cache(split, halves, both[:, 0], both[:, 1], rope_metadata(positions, slots))
        turned = split[:, : 6 * dim].view(tokens, 6, dim)
        torch.testing.assert_close(turned, results[1][0].view(tokens, 6, dim)[..., order], atol=1e-6, rtol=1e-6)


def test_sample_agrees_with_its_definition() -> None:
    rows, vocabulary = 400, 1000
    logits = torch.randn(rows, vocabulary) * torch.rand(rows, 1) * 8
    logits[::7, 5:900] = -torch.inf
    logits[::5] = logits[::5].round()  # many ties
    temperature = torch.rand(rows).mul(2).masked_fill(torch.rand(rows) < 0.1, 0)
    top_k = torch.randint(0, 60, (rows,)).masked_fill(torch.rand(rows) < 0.5, 0).int()
    top_p = (torch.rand(rows) + 0.3).clamp(max=1)
    min_p = torch.rand(rows).mul(0.3).masked_fill(torch.rand(rows) < 0.5, 0)
    uniform = torch.rand(rows, dtype=torch.float64)
    settings, native = SamplingTensors(temperature, top_k, top_p, min_p), ops.current_backend()
    expected, got = (backend.sample(logits.clone(), settings, uniform) for backend in (REFERENCE, native))
    assert (expected != got).sum() <= 1  # a uniform may fall within rounding of a boundary
    for i in range(0, rows, 37):
        one = SamplingTensors(*(s[i : i + 1] for s in settings))
        assert native.sample(logits[i : i + 1].clone(), one, uniform[i : i + 1]) == got[i]


def test_sample_follows_the_distribution() -> None:
    draws = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -torch.inf]).repeat(draws, 1)
    ones, off = torch.ones(draws), torch.zeros(draws)
    settings, uniform = SamplingTensors(ones, off.int(), ones, off), torch.rand(draws, dtype=torch.float64)
    ids = ops.current_backend().sample(logits.clone(), settings, uniform)
    shares = ids.bincount(minlength=5) / draws
    torch.testing.assert_close(shares, logits[0].softmax(0), atol=0.015, rtol=0)
    assert shares[4] == 0


def test_sample_handles_rows_with_nan_and_inf() -> None:
    logits = torch.stack([torch.full((50,), x) for x in (torch.nan, -torch.inf, torch.inf, 0.0)])
    logits[3, 7] = torch.nan
    ones = torch.ones(4)
    settings = SamplingTensors(ones, torch.zeros(4).int(), ones * 0.9, ones * 0)
    ids = ops.current_backend().sample(logits, settings, torch.rand(4, dtype=torch.float64))
    assert ((ids >= 0) & (ids < 50)).all()


def test_log_probs() -> None:
    logits, ids = torch.randn(9, 5000) * 4, torch.randint(5000, (9,))
    logits[2] = logits[2].round()
    for mine, theirs in zip(ops.log_probs(logits, ids, 20), REFERENCE.log_probs(logits, ids, 20), strict=True):
        if mine.dtype == torch.int64:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-6)


def test_bitmask() -> None:
    logits = torch.randn(4, 77)
    mask = torch.randint(-(2**31), 2**31, (2, 3), dtype=torch.int64).int()
    mine, theirs, rows = logits.clone(), logits.clone(), torch.tensor([3, 1])
    ops.apply_bitmask(mine, mask, rows)
    REFERENCE.apply_bitmask(theirs, mask, rows)
    assert torch.equal(mine, theirs) and mine.isinf().any() and torch.equal(mine[0], logits[0])


def test_torch_fallback_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.kernels.cpu.build.shutil.which", lambda name: None)
    backend = ops.start_backend(threads=2, cache_dir=tmp_path)
    assert backend.library is None and "install g++" in str(ops.current_backend())
    x, weight = torch.randn(3, 40), torch.randn(12, 40).to(BF16)
    torch.testing.assert_close(ops.linear(x, LinearLayer(ops.pack_linear(weight))), x @ weight.float().T)


def test_broken_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.kernels.cpu.build.shutil.which", lambda name: "/bin/false")
    assert ops.start_backend(cache_dir=tmp_path).library is None
    assert not list(tmp_path.iterdir())
