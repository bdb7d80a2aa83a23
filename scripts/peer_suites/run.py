"""Run the server tests of vLLM, SGLang and llama.cpp against `emberline serve` and count what passes.

    python scripts/peer_suites/run.py vllm --source CLONE --tree . --python PYTHON --out DIR/vllm.json [tests]

Needs an environment with the packages in requirements.txt. Nothing of a peer is kept in this repository: CLONE is a git
clone of it.
docs/peer-suites.md describes what is replaced in the suites and what is set aside.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEST_TIMEOUT_S = {"vllm": 60, "llama": 60, "sglang": 180}  # one of SGLang's tests sends dozens of requests

_VLLM = "tests/entrypoints"
# Per suite: what is taken from the clone, where pytest starts and the files that call a server.
SUITES: dict[str, tuple[list[str], str, list[str]]] = {
    "vllm": (
        [_VLLM, "tests/tool_use"],
        ".",
        [
            f"{_VLLM}/anthropic/test_messages.py",
            f"{_VLLM}/openai/chat_completion",
            f"{_VLLM}/openai/completion",
            f"{_VLLM}/openai/models",
            f"{_VLLM}/openai/responses",
            f"{_VLLM}/openai/test_async_tokenization.py",
            f"{_VLLM}/openai/test_chunked_prompt.py",
            f"{_VLLM}/openai/test_return_token_ids.py",
            f"{_VLLM}/openai/test_return_tokens_as_ids.py",
            f"{_VLLM}/serve/tokenize/test_tokenization.py",
            f"{_VLLM}/serve/instrumentator/test_basic.py",
            "tests/tool_use",
        ],
    ),
    "sglang": (
        ["test/registered/openai_server", "test/manual/openai_server", "python/sglang/test/kits"],
        ".",
        ["test/registered/openai_server", "test/manual/openai_server"],
    ),
    "llama": (["tools/server/tests"], "tools/server/tests", ["unit"]),
}


def _extract(source: Path, paths: list[str], into: Path) -> None:
    git = ["git", "-C", str(source), "archive", "HEAD", "--", *paths]
    with subprocess.Popen(git, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "x", "-C", str(into)], stdin=archive.stdout, check=True)
    if (into / "tests").is_dir():
        (into / "tests/__init__.py").touch()


def _find_tokenizer() -> str:
    """Return the newest checkpoint of smollm2 in the cache."""
    folder = Path.home() / ".cache/emberline/checkpoints"
    found = sorted(folder.glob("smollm2-*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"there is no checkpoint of smollm2 in {folder} (hint: run `emberline pull smollm2`)")
    return str(found[-1].parent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--source", type=Path, required=True, help="git clone of the peer, or its git directory")
    parser.add_argument("--tree", type=Path, required=True, help="checkout of Emberline that is served")
    parser.add_argument("--python", type=Path, required=True, help="interpreter that Emberline runs in")
    parser.add_argument("--tokenizer", help="directory with smollm2's tokenizer.json; default: the newest in the cache")
    parser.add_argument("--out", type=Path, required=True)
    asked, further = parser.parse_known_args()  # further: pytest's
    paths, start, files = SUITES[asked.suite]
    tokenizer = asked.tokenizer or _find_tokenizer()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="peer-suite-") as kept:
        _extract(asked.source, paths, Path(kept))
        environment = os.environ | {
            "PYTHONPATH": str(HERE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "EMBERLINE_TREE": str(asked.tree.resolve()),
            "EMBERLINE_PYTHON": str(asked.python.absolute()),  # not resolved: it may be a link in an environment
            "EMBERLINE_LOG": str(asked.out.with_suffix(".log").resolve()),
            "SMOLLM2_TOKENIZER": tokenizer,
            "PEER_SUITE": asked.suite,
            "PEER_RESULTS": str(asked.out.resolve()),
        }
        plugins = ["-p", "recorder", "-p", f"{asked.suite}_shim", "-p", "no:cacheprovider"]
        options = [
            "-c",
            "/dev/null",
            "--rootdir",
            ".",
            "-o",
            "asyncio_mode=auto",
            f"--timeout={TEST_TIMEOUT_S[asked.suite]}",
        ]
        command = [sys.executable, "-m", "pytest", *plugins, *options, "--continue-on-collection-errors", "--tb=short"]
        return subprocess.run(
            [*command, *(further if any(".py" in each for each in further) else [*further, *files])],
            cwd=Path(kept) / start,
            env=environment,
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
