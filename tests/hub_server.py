"""A small HTTP server on loopback for the download tests: ranges, broken connections, wrong answers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT_SHA = "5d0f6a1f1a6c4f7e9a55c3f8c4f8f3c7b1b5a9d2"


@dataclass
class Page:
    body: bytes
    type: str = "application/octet-stream"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    breaks: list[int] = field(default_factory=list)  # per answer: cut the connection after so many bytes


@dataclass
class Site:
    url: str = ""
    pages: dict[str, Page] = field(default_factory=dict)
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, path, headers
    fallback: Callable[[str], Page] = lambda path: Page(b"no such page", "text/plain", 404)


@contextmanager
def serving() -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            site.seen.append((self.command, path, dict(self.headers)))
            page = site.pages.get(path) or site.fallback(path)
            body, status, extra = page.body, page.status, dict(page.headers)
            wanted = self.headers.get("Range")
            if wanted and page.ranges and status == 200:
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                extra["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                status, body = (206, body[start:]) if start < len(body) else (416, b"")
            self.send_response(status)
            for name, value in {"Content-Type": page.type, "Content-Length": str(len(body)), **extra}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body and page.breaks:
                self.wfile.write(body[: page.breaks.pop(0)])
                self.wfile.flush()
                self.close_connection = True
            elif with_body:
                self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(True)

        def do_HEAD(self) -> None:
            self.answer(False)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serve_repository(site: Site, files: dict[str, bytes]) -> None:
    """Answer like the Hugging Face hub for the repository org/name, with the revisions main and v1."""

    def oid(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    info = {"_id": "1", "id": "org/name", "sha": COMMIT_SHA, "siblings": [{"rfilename": f} for f in files]}
    tree = [{"type": "file", "path": f, "size": len(d), "oid": oid(d)} for f, d in files.items()]
    for revision in ("main", "v1"):
        site.pages[f"/api/models/org/name/revision/{revision}"] = Page(json.dumps(info).encode(), "application/json")
    site.pages[f"/api/models/org/name/tree/{COMMIT_SHA}"] = Page(json.dumps(tree).encode(), "application/json")
    for f, d in files.items():
        headers = {"ETag": f'"{oid(d)}"', "X-Repo-Commit": COMMIT_SHA}
        site.pages[f"/org/name/resolve/{COMMIT_SHA}/{f}"] = Page(d, headers=headers)
