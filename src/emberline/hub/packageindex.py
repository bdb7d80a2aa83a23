"""Finds files on a Python package index with pip's settings, so that mirrors and proxies work."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from emberline.core.errors import DownloadError
from emberline.hub.download import RETRYABLE, HTTPDownloader, redact_credentials

PUBLIC_INDEX_URL = "https://pypi.org/simple"
ACCEPT_HEADER = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
MAX_PAGE_BYTES = 32 << 20
PIP_TIMEOUT_S = 1200
PIP_VARIABLES = {"index-url": "PIP_INDEX_URL", "extra-index-url": "PIP_EXTRA_INDEX_URL", "cert": "PIP_CERT"}


@dataclass(frozen=True)
class PackageIndexSettings:
    urls: tuple[str, ...] = (PUBLIC_INDEX_URL,)
    ca_file: str | None = None


def read_pip_settings() -> PackageIndexSettings:
    """Return pip's settings from its files and the environment, or from the environment if pip is not installed."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # container images have no pip
        found = {key: os.environ.get(name) for key, name in PIP_VARIABLES.items()}
        text = "\n".join(f":env:.{key}={value!r}" for key, value in found.items() if value)
    return parse_pip_settings(text)


def parse_pip_settings(text: str) -> PackageIndexSettings:
    values: dict[str, str] = {}
    rank = {"global": 0, "download": 1, ":env:": 2}
    for line in sorted(text.splitlines(), key=lambda line: rank.get(line.partition(".")[0], -1)):
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in rank and value[:1] in "'\"":
            values[key] = str(ast.literal_eval(value))
    urls = [values.get("index-url", PUBLIC_INDEX_URL), *values.get("extra-index-url", "").split()]
    return PackageIndexSettings(tuple(u for u in urls if urlsplit(u).scheme in ("http", "https")), values.get("cert"))


def find_file_url(client: HTTPDownloader, settings: PackageIndexSettings, project: str, filename: str) -> str:
    """Return the file's URL on the first index that has the file. Raise DownloadError if none has it."""
    failures = []
    for index in settings.urls:
        page = f"{index.rstrip('/')}/{project}/"
        try:
            with client.get(page, {"Accept": ACCEPT_HEADER}) as response:
                links = _parse_links(response.read(MAX_PAGE_BYTES), response.headers.get_content_type())
        except (*RETRYABLE, ValueError) as e:
            failures.append(f"{redact_credentials(page)}: {e}")
            continue
        for link in links:
            if unquote(urlsplit(link).path).rsplit("/", 1)[-1] == filename:
                return urljoin(page, urldefrag(link).url)
        failures.append(f"{redact_credentials(page)}: no {filename}")
    hint = "check the network and pip's index-url"
    raise DownloadError(f"no package index has {filename} ({'; '.join(failures)})", hint=hint)


def _parse_links(page: bytes, content_type: str) -> list[str]:
    if content_type.endswith("json"):
        files: Any = json.loads(page).get("files", [])
        return [str(f["url"]) for f in files if isinstance(f, dict) and "url" in f]
    parser = _LinkParser()
    parser.feed(page.decode("utf-8", "replace"))
    return parser.links


class _LinkParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def pip_download(requirement: str, folder: Path, quiet: bool) -> None:
    """Download a wheel with pip, which supports keyrings, find-links and client certificates.

    Unlike our own download, pip cannot resume. Raise DownloadError if pip is not installed, as in container images.
    """
    if importlib.util.find_spec("pip") is None:
        hint = "PIP_INDEX_URL, and PIP_CERT for its certificate authority, select another index"
        raise DownloadError(f"{requirement} cannot be downloaded with pip, which is not installed", hint=hint)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    try:
        command += ["--quiet", requirement] if quiet else [requirement]
        done = subprocess.run(command, stdout=sys.stderr, timeout=PIP_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as e:
        raise DownloadError(f"pip download {requirement} failed: {e}") from e
    if done.returncode:
        raise DownloadError(f"pip download {requirement} failed with exit status {done.returncode}")
