"""Rules of mixtures of experts in the native kernels, compared with the reference in float32 and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from native_backend import native_backend
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.mixture import ClampedSwiGLU, Expert, Mixture, Routing, SharedExpert, select_experts
from emberline.kernels.packed_weight import PackedWeight
from emberline.kernels.reference import ReferenceBackend

REFERENCE = ReferenceBackend()
HIDDEN, FFN, SHARED_FFN, COUNT = 72, 40, 56, 12
BIAS, CORRECTION = torch.linspace(-1, 1, COUNT).roll(5), torch.linspace(0.4, -0.4, COUNT).roll(3)
ROUTINGS = {
    "softmax": Routing(3),
    "softmax-renormalised": Routing(3, renormalize=True, scale=2.5),
    "router-bias": Routing(3, renormalize=True, bias=BIAS),
    "softmax-corrected": Routing(3, correction=CORRECTION),
    "softmax-corrected-renormalised": Routing(3, renormalize=True, correction=CORRECTION),
    "softmax-groups": Routing(3, groups=4, groups_per_row=2, scale=16.0),
    "sigmoid": Routing(2, scores="sigmoid"),
    "sigmoid-saturated": Routing(2, scores="sigmoid", bias=40 + 10 * BIAS),
    "sigmoid-vanishing": Routing(2, renormalize=True, scores="sigmoid", bias=BIAS - 100),
    "sigmoid-inputs": Routing(1, scores="sigmoid", scales_inputs=True),
    "sigmoid-inputs-two": Routing(2, scores="sigmoid", scales_inputs=True),
    "sigmoid-corrected": Routing(4, renormalize=True, scores="sigmoid", correction=CORRECTION, scale=2.5),
    "sigmoid-corrected-plain": Routing(4, scores="sigmoid", correction=CORRECTION),
    "sigmoid-groups": Routing(
        4, renormalize=True, scores="sigmoid", correction=CORRECTION, groups=3, groups_per_row=1, group_best=2
    ),
    "sigmoid-groups-two": Routing(
        4, renormalize=True, scores="sigmoid", correction=CORRECTION, groups=4, groups_per_row=2, group_best=2, scale=2
    ),
}
Pack = Callable[..., PackedWeight]


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    with native_backend():
        yield


def pack_as_double(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    return PackedWeight(weight.double(), *weight.shape, weight.dtype, gated=gated)


def to_double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def make_expert(pack: Pack, ffn: int = FFN, *, gated: bool = True, biased: bool = False) -> Expert:
    gate_up, down = torch.randn(2 * ffn, HIDDEN) / 4, torch.randn(HIDDEN, ffn) / 6
    biases = [torch.randn(2 * ffn), torch.randn(HIDDEN)] if biased else [None, None]
    biases = [to_double(bias) for bias in biases] if pack is pack_as_double else biases
    return Expert(pack(gate_up, gated=gated), pack(down), *biases)


def make_mixture(
    pack: Pack, routing: Routing, *, clamp: ClampedSwiGLU | None = None, gated: bool = True, biased: bool = False
) -> Mixture:
    torch.manual_seed(1)
    if pack is pack_as_double:
        routing = replace(routing, bias=to_double(routing.bias), correction=to_double(routing.correction))
    router, norm = pack(torch.randn(COUNT, HIDDEN) / 4), torch.rand(HIDDEN) + 0.5
    experts = tuple(make_expert(pack, gated=gated, biased=biased) for _ in range(COUNT))
    return Mixture(norm, 1e-5, router, experts, routing, clamp=clamp)


def check(make: Callable[[Pack], Mixture], rows: int = 37) -> Tensor:
    """Compare the backends; return the output. Our error may be a few times that of torch in float32."""
    torch.manual_seed(2)
    x = torch.randn(rows, HIDDEN)
    packs: tuple[Pack, ...] = ops.pack_linear, REFERENCE.pack_linear, pack_as_double
    ours, theirs, exact = (
        run(inputs.clone(), make(pack))
        for run, inputs, pack in zip(
            (ops.run_mixture, REFERENCE.run_mixture, REFERENCE.run_mixture), (x, x, x.double()), packs, strict=True
        )
    )
    scale = exact.abs().max()
    assert (theirs - exact).abs().max() < 5e-6 * scale
    assert (ours - exact).abs().max() < 5e-6 * scale
    made = make(ops.pack_linear)
    alone = torch.cat([ops.run_mixture(row[None].clone(), made) for row in x])
    assert torch.equal(alone, ours), "a row depends on others"
    return ours - x


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name: str) -> None:
    check(lambda pack: make_mixture(pack, ROUTINGS[name]))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_shared_expert(gate: bool, scale: float) -> None:
    def make(pack: Pack) -> Mixture:
        mixture = make_mixture(pack, ROUTINGS["softmax"])
        weight = pack(torch.randn(1, HIDDEN) / 4) if gate else None
        return replace(mixture, shared=SharedExpert(make_expert(pack, SHARED_FFN), weight, scale))

    without = check(lambda pack: make_mixture(pack, ROUTINGS["softmax"]))
    assert (check(make) - without).abs().max() > 0.1


@pytest.mark.parametrize("clamp", [None, ClampedSwiGLU(1.702, 1.0), ClampedSwiGLU(1.0, 2.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_biases_and_clamped_activation(clamp: ClampedSwiGLU | None, biased: bool) -> None:
    routing = ROUTINGS["router-bias"]
    out = check(lambda pack: make_mixture(pack, routing, clamp=clamp, gated=False, biased=biased))
    plain = check(lambda pack: make_mixture(pack, routing))
    assert torch.allclose(out, plain, atol=1e-4) == (clamp is None and not biased)


def test_saturated_sigmoids_are_ordered_by_their_logits() -> None:
    logits = torch.tensor([[30.0, 60.0, 20.0, 40.0]])
    weights, chosen = select_experts(logits, Routing(2, scores="sigmoid"))
    assert chosen.tolist() == [[1, 3]] and weights.tolist() == [[1.0, 1.0]]


def test_correction_chooses_but_does_not_weigh() -> None:
    logits, correction = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, chosen = select_experts(logits, Routing(2, scores="sigmoid", correction=correction, scale=2.0))
    assert chosen.tolist() == [[3, 0]]
    assert torch.allclose(weights, 2 * logits[0, [3, 0]].sigmoid())


def test_groups() -> None:
    """The best group by its maximum is the first; by the sum of its two best, the second."""
    logits = torch.tensor([[4.0, -4.0, -4.0, 1.0, 1.0, -4.0]])
    by_best = Routing(2, scores="sigmoid", groups=2, groups_per_row=1)
    assert select_experts(logits, by_best)[1].tolist() == [[0, 1]]
    assert select_experts(logits, replace(by_best, group_best=2))[1].tolist() == [[3, 4]]


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid-groups", "softmax-corrected", "softmax-groups"])
def test_rows_of_nan_stay_alone(name: str) -> None:
    made, x = make_mixture(ops.pack_linear, ROUTINGS[name]), torch.randn(5, HIDDEN)
    x[2] = torch.nan
    out = ops.run_mixture(x.clone(), made)
    assert out[2].isnan().all() and not out[[0, 1, 3, 4]].isnan().any()
    assert torch.equal(out[3:], ops.run_mixture(x[3:].clone(), made))


def test_streams_are_joined_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a capture that fails could not be ended, and memory would be reused while the second stream reads."""
    pytest.importorskip("triton")
    from emberline.kernels.cuda.expert_layer import ExpertLayer

    waits: list[tuple[object, object]] = []

    class RecordingStream:
        def wait_stream(self, other: object) -> None:
            waits.append((self, other))

    main, second, x = RecordingStream(), RecordingStream(), torch.zeros(1, HIDDEN)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    matrix = PackedWeight(torch.zeros(1), 1, 1, torch.bfloat16)
    shared = SharedExpert(Expert(matrix, matrix))
    mixture = Mixture(torch.zeros(1), 1e-5, matrix, (), Routing(1), shared)
    with pytest.raises(AttributeError):
        ExpertLayer(None)._run_in_two_streams(second, x, x, x, mixture, None)  # type: ignore[arg-type]
    assert waits == [(second, main), (main, second)]
