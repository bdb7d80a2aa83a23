"""Continued messages: the prompt ends with the message's content for every template."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from bytelevel import build

from emberline.api.call import ChatCall, CommonFields
from emberline.api.tool_styles.registry import HERMES
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.prompt_builder import END_MARKER, PromptBuilder

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMS = CHATML.replace("m.content", "m.content | trim")
MUTE = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


def render_continued(template: str, content: str, question: str = "q") -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": content}]
    call = ChatCall(CommonFields("m"), messages, SamplingParams(), continues_last_message=True)
    return PromptBuilder(Tokenizer(build()), ChatTemplate({"default": template}, {}), HERMES, 1000).render(call)


@pytest.mark.parametrize("content", ["<", "|", "e", "end", " foo", "foo \n", END_MARKER, f"a{END_MARKER * 3}"])
@pytest.mark.parametrize("question", ["q", "end", END_MARKER])
def test_continued_prompt_ends_with_the_content(content: str, question: str) -> None:
    before = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert render_continued(CHATML, content, question) == before + content.rstrip()
    assert render_continued(TRIMS, content, question) == before + content.strip()


def test_many_bad_words_are_tokenized_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(build())
    builder = PromptBuilder(tokenizer, None, HERMES, 1000)
    used: list[threading.Thread] = []
    encode_batch = tokenizer.encode_batch

    def record_thread(texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        used.append(threading.current_thread())
        return encode_batch(texts, add_special)

    monkeypatch.setattr(tokenizer, "encode_batch", record_thread)

    def find_words(bad_words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        call = ChatCall(CommonFields("m"), [], SamplingParams(), bad_words=bad_words)
        return asyncio.run(builder.params_with_bad_words(call)).bad_words

    assert find_words(["ab", " ab"]) == tuple(tuple(tokenizer.encode(text)) for text in ("ab", " ab"))
    assert len(find_words(["a" * 1000 + str(i) for i in range(9)])) == 18
    assert used[-1] is not threading.main_thread() and threading.main_thread() in used
    builder.close()


@pytest.mark.parametrize(("template", "content"), [(CHATML, ""), (CHATML, " \n"), (MUTE, "foo"), (MUTE, END_MARKER)])
def test_message_without_rendered_text_is_rejected(template: str, content: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render_continued(template, content, content)
