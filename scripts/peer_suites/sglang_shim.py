"""pytest plugin: SGLang's popen_launch_server starts `emberline serve` instead."""

from __future__ import annotations

import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

from serving import option, serving, set_aside
from stubs import set_module, stub_packages

CHAT_MODEL = "meta-llama/Llama-3.1-8B-Instruct"  # the name that some tests write out


def _launch(
    model: str, base_url: str, timeout: float, api_key: str | None = None, other_args: Any = (), **_: Any
) -> Any:
    if model != CHAT_MODEL and not model.startswith(("Qwen/", "mistralai/", "meta-llama/", "LiquidAI/")):
        set_aside(f"another model: {model}")
    arguments = [str(each) for each in other_args or ()]
    context = option(arguments, "--context-length", "--context-len")
    serving.start(model, context=int(context) if context else None, api_key=api_key)
    return types.SimpleNamespace(pid=0, poll=lambda: None)


class CustomTestCase(unittest.TestCase):
    pass


def _tokenizer(*_: Any, **__: Any) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(os.environ["SMOLLM2_TOKENIZER"])


def _install() -> None:
    stub_packages("sglang")
    import sglang.srt.utils.hf_transformers_utils
    import sglang.test.ci.ci_register
    import sglang.test.kits
    import sglang.test.test_utils  # noqa: F401

    # The mixins with tests are the peer's; everything else of its package is a stub.
    sys.path.insert(0, str(Path.cwd() / "python/sglang/test/kits"))
    for name in ("anthropic_messages_kit", "matched_stop_kit"):
        sys.modules[f"sglang.test.kits.{name}"] = __import__(name)
    set_module("sglang.test.ci.ci_register", **dict.fromkeys(("register_cuda_ci", "register_amd_ci"), lambda **_: None))
    set_module("sglang.srt.utils", kill_process_tree=lambda *_, **__: None)
    set_module("sglang.srt.utils.hf_transformers_utils", get_tokenizer=_tokenizer)
    set_module(
        "sglang.test.test_utils",
        CustomTestCase=CustomTestCase,
        popen_launch_server=_launch,
        is_rust_server_built=lambda: False,
        DEFAULT_URL_FOR_TEST=serving.url,
        DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH=600,
        DEFAULT_SMALL_MODEL_NAME_FOR_TEST=CHAT_MODEL,
        DEFAULT_MODEL_NAME_FOR_TEST=CHAT_MODEL,
        DEFAULT_SMALL_CROSS_ENCODER_MODEL_NAME_FOR_TEST="cross-encoder",
    )


_install()
