"""The kernels of collectives.cu, compiled for a CPU: bits, order of memory accesses, and ranks that do not come.

Every thread of a CTA is a thread of the operating system, and a race detector watches them: a missing or too weak flag
is found even if the result is right. `emulated_cuda/` replaces the headers that have inline assembly.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from emulated_kernels import compile_emulated

from emberline.kernels.comm.communicator import gather_bytes
from emberline.kernels.comm.thread_group import ThreadCommunicator, ThreadGroup
from emberline.kernels.comm.thresholds import prefers_two_shot
from emberline.kernels.cuda import collectives, nvrtc

ALL_KINDS = "01234567"
RACE_STATUS = 66  # exit status of the race detector
# What is wrong, in which calls that shows, and a text of the kernels with its replacement.
MISTAKES = {
    "no second barrier": (
        "012",
        "if (!pass_barrier(group, call, 1,",
        "if (mistake != {} && !pass_barrier(group, call, 1,",
    ),
    "one slot": ("0123456", "(call & 1) * group.slot_bytes", "(mistake == {} ? 0 : call & 1) * group.slot_bytes"),
    "no release": ("012", "  store_release(&header_of", "  (mistake == {} ? store_relaxed : store_release)(&header_of"),
    "three messages": ("7", "message - 2, to)", "message - (mistake == {} ? 3 : 2), to)"),
    "missing rounds": ("6", "int(round) * area", "int(mistake == {} ? 0 : round) * area"),
    "another call": ("0", "BITS | signature;", "BITS | (signature + (mistake == {}) * group.rank);"),
    "calls after giving up": (
        "01245",
        "->calls, GAVE_UP);",
        "->calls, mistake == {} ? call - 1 : GAVE_UP);",
    ),
}
NEEDS_LATE_RANK = "calls after giving up"  # a mistake that shows only then


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    edits = [(right, wrong.format(number)) for number, (_, right, wrong) in enumerate(MISTAKES.values(), 1)]
    folder = tmp_path_factory.mktemp("emulated")
    return compile_emulated(folder, "run_collectives.cpp", ["-fsanitize=thread"], edits)


def run(
    program: Path, ranks: int, calls: int, kinds: str, mistake: int = 0, absent: int = -1, late: int = -1, seed: int = 1
) -> tuple[int, str]:
    command = [str(program), *map(str, (ranks, calls, seed, kinds, mistake, absent, late))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr + done.stdout


@pytest.mark.parametrize("ranks", [1, 4])
def test_bits_and_order(program: Path, ranks: int) -> None:
    assert run(program, ranks, 25, ALL_KINDS) == (0, "0 wrong, 0 gave up\n")


@pytest.mark.parametrize("what", [each for each in MISTAKES if each != NEEDS_LATE_RANK])
def test_mistakes_are_found(program: Path, what: str) -> None:
    number = list(MISTAKES).index(what) + 1
    for seed in range(8):  # some mistakes show only if a rank is late
        status, output = run(program, 3, 20, MISTAKES[what][0], number, seed=seed)
        if status:
            break
    assert status in (1, RACE_STATUS), output
    if what == "another call":
        assert f": reason {collectives.OTHER_CALL} " in output


@pytest.mark.parametrize("kinds", ["012", "7"])
def test_absent_rank(program: Path, kinds: str) -> None:
    """The other ranks give up, because rank 1 does not come, or because another gave up."""
    status, output = run(program, 3, 10, kinds, absent=1)
    assert status == 1 and "2 gave up" in output
    assert f"reason {collectives.TIMED_OUT} rank 1" in output


@pytest.mark.parametrize("kinds", [MISTAKES[NEEDS_LATE_RANK][0], "6", "7"])
def test_late_rank(program: Path, kinds: str) -> None:
    """A rank that comes after the others gave up, and made further calls, does not take these for the right ones."""
    status, output = run(program, 2, 4, kinds, late=1)
    assert status == 1 and "0 wrong, 2 gave up" in output
    assert f"rank 0: reason {collectives.TIMED_OUT} rank 1" in output
    assert f"rank 1: reason {collectives.ANOTHER_GAVE_UP} rank 0" in output


@pytest.mark.parametrize("kinds", [MISTAKES[NEEDS_LATE_RANK][0], "4"], ids=["other signature", "same signature"])
def test_calls_after_giving_up_are_found(program: Path, kinds: str) -> None:
    """Without the rule, the late rank finds the signature of another call, or reads its data."""
    number, wrong = list(MISTAKES).index(NEEDS_LATE_RANK) + 1, f"rank 1: reason {collectives.OTHER_CALL} rank 0"
    for seed in range(8):
        _, output = run(program, 2, 4, kinds, number, late=1, seed=seed)
        if wrong in output if kinds != "4" else "0 wrong" not in output:
            return
    pytest.fail(output)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
def test_kernels_compile_for_other_gpus(architecture: str) -> None:
    options = (*nvrtc.compiler_options(architecture), "--Ofast-compile=max")
    assert nvrtc.compile_cached(collectives.FILE, collectives.VARIANTS, options).code[:4] == b"\x7fELF"


def test_constants_are_those_of_the_kernels() -> None:
    text = (nvrtc.SOURCE_DIR / "barrier.cuh").read_text()
    assert f"MAX_RANKS = {collectives.MAX_RANKS}, MAX_BLOCKS = {collectives.MAX_BLOCKS};" in text
    for name in ("TIMED_OUT", "OTHER_CALL", "STOPPED", "ANOTHER_GAVE_UP"):
        assert re.search(rf"\b{name} = {getattr(collectives, name)}\b", text)
    (fields,) = re.findall(r"struct Group \{(.*?)\n\};", text, re.DOTALL)
    names = re.findall(r"(\w+)(?:\[MAX_RANKS\])?[;,]", re.sub(r"//.*", "", fields))
    assert names == [field[0] for field in collectives.Group._fields_]


def test_choices_by_size() -> None:
    assert not prefers_two_shot(1 << 30, 2)
    assert [prefers_two_shot(size << 10, 4) for size in (512, 513)] == [False, True]
    assert [prefers_two_shot(size << 10, 7) for size in (160, 161)] == [False, True]
    assert [collectives.choose_norm_threads(columns) for columns in (256, 576, 4096, 5120, 16384)] == [
        (32, 1), (64, 2), (256, 2), (512, 2), (512, 4)
    ]  # fmt: skip


def test_gathered_bytes() -> None:
    data = [b"", b"abc", b"\0" * 5]
    assert ThreadGroup(3).run(lambda comm: gather_bytes(comm, data[comm.rank])) == [data] * 3


def test_calls_that_are_made_of_others() -> None:
    """Sums are rounded before they are added."""
    parts = [torch.tensor([[256.0, 1.0]]), torch.tensor([[0.5, 2.0]])]
    weight = torch.tensor([2.0, 1.0])

    def run_rank(comm: ThreadCommunicator) -> tuple[list[float], ...]:
        rank = comm.rank
        x = torch.full((1, 2), 1.0).bfloat16()
        added = comm.all_reduce_add(x, parts[rank].bfloat16())
        assert added is x
        y = torch.full((1, 2), 1.0)
        normed = comm.all_reduce_add_norm(y, parts[rank].clone(), weight, 0.0)
        scale = float(y.square().mean().rsqrt())
        assert normed.tolist() == [pytest.approx([y[0, 0].item() * scale * 2, y[0, 1].item() * scale])]
        return (x[0].tolist(), comm.broadcast(torch.tensor([rank + 5, 1]), 1).tolist())

    assert ThreadGroup(2).run(run_rank) == [([256.0, 4.0], [6, 1])] * 2  # 256.5 and 257 are rounded to 256
