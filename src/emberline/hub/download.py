"""Downloads a file over HTTP, with resume and retries. The file appears only after its SHA-256 is verified."""

from __future__ import annotations

import base64
import errno
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from emberline.core.errors import DownloadError, ModelError
from emberline.hub.progress import DownloadProgress

CHUNK_BYTES = 1 << 18
READ_TIMEOUT_S = 30
MAX_ATTEMPTS = 5
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of the local disk: retrying does not help
RETRYABLE = (OSError, http.client.HTTPException)  # URLError, timeouts and resets are OSErrors


class HTTPDownloader:
    """Sends GET requests through the system's proxies. A CA file and credentials in the URL work as in pip."""

    def __init__(self, ca_file: str | None = None) -> None:
        context = ssl.create_default_context()
        if ca_file:
            context.load_verify_locations(ca_file)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    def get(self, url: str, headers: dict[str, str] | None = None) -> Any:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise DownloadError(f"{redact_credentials(url)} is not an HTTP URL")
        host = parts.netloc.rpartition("@")[2]
        request = urllib.request.Request(urlunsplit(parts._replace(netloc=host, fragment="")), headers=headers or {})
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(pair).decode())
        return self._opener.open(request, timeout=READ_TIMEOUT_S)


def redact_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def download_file(
    client: HTTPDownloader,
    url: str,
    target: Path,
    sha256: str,
    size: int,
    progress: DownloadProgress,
    retry_delay_s: float = 1.0,
) -> None:
    """Download `url` to `target` and verify its SHA-256.

    An incomplete download stays beside `target` as *.part, and the next attempt resumes it. Raise DownloadError, or
    ModelError if the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    reason = ""
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            time.sleep(retry_delay_s * 2 ** (attempt - 1))
        try:
            digest = _fetch_with_resume(client, url, part, size, progress)
        except urllib.error.HTTPError as e:
            reason = f"HTTP {e.code}"
            if e.code == 416:  # the partial file is longer than the server's file
                part.unlink(missing_ok=True)
            elif e.code < 500 and e.code not in (408, 429):
                break
            continue
        except RETRYABLE as e:
            if isinstance(e, OSError) and e.errno in DISK_FULL_ERRNOS:
                hint = "free disk space, or set EMBERLINE_CACHE to another directory; then run it again: it resumes"
                raise ModelError(f"cannot write {part}: {e.strerror}", hint=hint) from e
            reason = str(e) or type(e).__name__
            continue
        if digest == sha256:
            part.replace(target)
            return
        part.unlink(missing_ok=True)
        reason = f"the SHA-256 of the file is {digest} instead of {sha256}"
    raise DownloadError(
        f"cannot download {redact_credentials(url)}: {reason}", hint="run the command again: it resumes"
    )


def _fetch_with_resume(client: HTTPDownloader, url: str, part_file: Path, size: int, progress: DownloadProgress) -> str:
    digest = hashlib.sha256()
    with part_file.open("a+b") as file:
        file.seek(0)
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
        done = file.tell()
        if done == size:
            return digest.hexdigest()
        if done > size:
            file.truncate(done := 0)
            digest = hashlib.sha256()
        with client.get(url, {"Range": f"bytes={done}-"} if done else {}) as response:
            if done and not _response_starts_at(response, done):
                file.truncate(done := 0)
                digest = hashlib.sha256()
            progress.resume(done)
            while block := response.read(min(CHUNK_BYTES, size + 1 - done)):
                done += len(block)
                file.write(block)
                digest.update(block)
                progress.add_bytes(len(block))
                if done > size:
                    break
        file.flush()
        os.fsync(file.fileno())
    if done < size:
        raise ConnectionError(f"the connection ended after {done} of {size} bytes")
    return digest.hexdigest()


def _response_starts_at(response: Any, start: int) -> bool:
    return response.status == 206 and (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-")
