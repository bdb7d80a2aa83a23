"""Forms: the gateway and the provider must read the same model, so ambiguous forms are rejected."""

from __future__ import annotations

import pytest
from gateway_requests import call

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.forms import is_form, read_form_fields, replace_form_model
from emberline.gateway.core.token_estimate import TOKENS_PER_ATTACHMENT
from emberline.gateway.costs.billing import estimate_request_input_tokens

TYPE = "multipart/form-data; boundary=b0"
MODEL = b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nopenai/whisper-1\r\n'
FILE = b'--b0\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
END = b"--b0--\r\n"


def part(head: bytes, value: bytes = b"small") -> bytes:
    return b"--b0\r\n%b\r\n\r\n%b\r\n" % (head, value)


@pytest.mark.parametrize(
    "kind", [TYPE, 'Multipart/Form-Data; boundary="b0"', "multipart/form-data;boundary=b0;charset=x"]
)
@pytest.mark.parametrize("content", [b"", b"\r\n", b"--b1--\r\n", b"\r\n--b", bytes(range(256)), b"{}" * 1000])
def test_model_is_read_and_replaced(kind: str, content: bytes) -> None:
    for body in (MODEL + FILE + content + b"\r\n" + END, FILE + content + b"\r\n" + MODEL + END):
        assert is_form(kind) and read_form_fields(body, kind).model == "openai/whisper-1"
        replaced = replace_form_model(body, kind, "whisper-1")
        assert replaced == body.replace(b"openai/whisper-1", b"whisper-1")


@pytest.mark.parametrize("count", ["1234x", " 10", "1e3", "-1", "\u00b2", "9" * 5000])
def test_count_that_is_no_number_is_rejected(count: str) -> None:
    field = part(b'Content-Disposition: form-data; name="n"', count.encode())
    with pytest.raises(InvalidRequest, match="it must be a whole number"):
        read_form_fields(MODEL + field + END, TYPE)


def test_other_fields() -> None:
    stream = part(b'content-disposition: form-data; name="stream"', b"true")
    count = part(b'Content-Disposition: form-data; name="n"', b"3")
    fields = read_form_fields(MODEL + stream + count + END, TYPE)
    assert fields.stream is True and fields.choice_count == 3
    assert (
        read_form_fields(part(b'Content-Disposition: form-data; name="model"; filename="m"') + END, TYPE).model is None
    )


def test_tokens_of_a_file_do_not_grow_with_its_size() -> None:
    text = part(b'Content-Disposition: form-data; name="prompt"', b"word " * 100)
    headers = {"content-type": TYPE}
    small, large = (call(text + FILE + bytes(size) + b"\r\n" + END, headers=headers) for size in (1, 1_000_000))
    assert estimate_request_input_tokens(small) == estimate_request_input_tokens(large) == 125 + TOKENS_PER_ATTACHMENT
    broken = call(b"x" * 4000, headers=headers)
    assert estimate_request_input_tokens(broken) == 1000


DISPOSITION = b"Content-Disposition: form-data; "


@pytest.mark.parametrize(
    "body",
    [
        MODEL + part(DISPOSITION + b'name="model"') + END,
        MODEL + part(DISPOSITION + b'name="model"; filename="x"') + END,
        MODEL + part(DISPOSITION + b'name="other"; name="model"') + END,
        MODEL + part(DISPOSITION + b'name="other"; filename="x"; name="model"') + END,
        MODEL + part(DISPOSITION + b"name*=utf-8''model") + END,
        MODEL + part(DISPOSITION + b"name=\"a\"; name*=utf-8''model") + END,
        MODEL + part(DISPOSITION + b"name=model") + END,
        MODEL + part(DISPOSITION + b'name="mo\\del"') + END,
        MODEL + part(b"X: y") + END,
        MODEL + part(b'Content-Disposition: attachment; name="model"') + END,
        MODEL + part(DISPOSITION + b'name="a"\r\n' + DISPOSITION + b'name="model"') + END,
        MODEL + part(DISPOSITION + b'name="a"\nX: y') + END,
        MODEL + part(DISPOSITION + b'\r\n name="model"') + END,
        MODEL + part(b'Content-Disposition : form-data; name="model"') + END,
        MODEL + part(DISPOSITION + b'name="model2"\r\nContent-Transfer-Encoding: base64') + END,
        b"preamble\r\n" + MODEL + END,
        b'{"model": "small"}\r\n' + MODEL + END,
        MODEL + END + part(DISPOSITION + b'name="model"') + END,
        MODEL + b"--b0x\r\n" + END,
        MODEL + b"--b0 \r\n" + END,
        MODEL,
        MODEL[:-2],
        END,
        b"",
        b"--b0",
        b"--b0\r\n\r\n",
        b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\n--b0\r\nX: y\r\n\r\nz\r\n--b0--\r\n',
        b'--b0\nContent-Disposition: form-data; name="model"\n\nsmall\n--b0--\n',
        part(DISPOSITION + b'name="a"') * 300 + END,
        part(DISPOSITION + b'name="model"', b"m" * 300) + END,
    ],
)
def test_ambiguous_forms_are_rejected(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        if read_form_fields(body, TYPE).model is None:
            raise InvalidRequest("the form has no model")


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "; boundary=b0; boundary=b1",
        ";boundary=",
        "; boundary=b0; xboundary=c",
        '; boundary="b0',
        "; boundary=b\u00e40",
    ],
)
def test_ambiguous_boundaries_are_rejected(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="boundary"):
        read_form_fields(MODEL + END, "multipart/form-data" + kind)


@pytest.mark.parametrize("value", [b"1234abc", b"1" * 5000, b"-1", b"", "\uff11".encode()])
def test_number_of_results_must_be_a_number(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="n is "):
        read_form_fields(MODEL + part(b'Content-Disposition: form-data; name="n"', value) + END, TYPE)


@pytest.mark.parametrize("name", [b"model", b"n", b"stream"])
def test_field_that_the_gateway_reads_comes_once(name: bytes) -> None:
    field = part(b'Content-Disposition: form-data; name="' + name + b'"', b"1")
    with pytest.raises(InvalidRequest, match="twice"):
        read_form_fields(field + field + END, TYPE)
