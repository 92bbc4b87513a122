"""A bucket on loopback: the requests of Google Cloud Storage's JSON API that TensorStore makes.

It keeps objects in memory with their generations, tells every change to who listens, and can be
told to refuse requests, so that a test decides what a bucket does and when.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from elastix.object_store.bucket import Bucket, Patience
from elastix.object_store.checkpoints import MARKER

URL = "gs://bucket/run"
QUICK = Patience(retries=3, first_delay=0.01, longest_delay=0.02, deadline=20.0)
ENVIRONMENT = ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING")

Objects = dict[str, tuple[bytes, int]]
"""(content, generation) of each object by name."""


class Request(NamedTuple):
    """What was asked of the bucket: `verb` is list, read, write or delete."""

    verb: str
    name: str


class FakeGCS:
    """One bucket, `bucket`, served until the block that it is entered for ends.

    `refuse` gives the status that a request is answered with instead, or None; `changed` is called
    after each change, before it is answered, so that what it kills never hears the answer.
    """

    def __init__(self) -> None:
        self.objects: Objects = {}
        self.page = 1000
        self.reset()
        self._lock, self._generation = threading.Lock(), 1000
        fake = self

        class Handler(_Handler):
            gcs = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def reset(self) -> None:
        """An empty bucket that refuses nothing."""
        self.objects.clear()
        self.requests: list[Request] = []
        self.refuse: Callable[[Request], int | None] = lambda request: None
        self.changed: Callable[[Request, Objects], None] = lambda request, objects: None

    def __enter__(self) -> FakeGCS:
        arguments = {"poll_interval": 0.02}
        threading.Thread(target=self._server.serve_forever, kwargs=arguments, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put(self, name: str, data: bytes) -> None:
        """An object that somebody else wrote."""
        with self._lock:
            self._generation += 1
            self.objects[name] = (data, self._generation)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))

    # --- what the handler asks ------------------------------------------------------------------

    def write(self, name: str, data: bytes, expected: int | None) -> int | None:
        """The new generation; None if the object is not of the one expected (0: absent)."""
        with self._lock:
            if expected is not None and self._generation_of(name) != expected:
                return None
            self._generation += 1
            self.objects[name] = (data, self._generation)
            self.changed(Request("write", name), dict(self.objects))
            return self._generation

    def delete(self, name: str, expected: int | None) -> int:
        with self._lock:
            if expected is not None and self._generation_of(name) != expected:
                return 412
            if self.objects.pop(name, None) is None:
                return 404
            self.changed(Request("delete", name), dict(self.objects))
            return 204

    def _generation_of(self, name: str) -> int:
        return self.objects[name][1] if name in self.objects else 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet: the second would wait for an answer
    disable_nagle_algorithm = True
    gcs: FakeGCS

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(30)

    def _parse(self) -> tuple[str, dict[str, str], bytes]:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        return parts.path, query, body

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _refused(self, path: str, verb: str, name: str) -> bool:
        if not re.match(r"(/upload)?/storage/v1/b/bucket(/|$)", path):
            self._answer(404, b'{"error": {"message": "The specified bucket does not exist."}}')
            return True
        request = Request(verb, name)
        self.gcs.requests.append(request)
        if status := self.gcs.refuse(request):
            self._answer(status, b'{"error": {"message": "refused by the test"}}')
            return True
        return False

    def do_GET(self) -> None:
        path, query, _ = self._parse()
        if match := re.fullmatch(r"/storage/v1/b/\w+/o/([^/]+)", path):
            if not self._refused(path, "read", unquote(match[1])):
                self._read(unquote(match[1]), query)
        elif not self._refused(path, "list", query.get("prefix", query.get("startOffset", ""))):
            self._list(query)

    def _read(self, name: str, query: dict[str, str]) -> None:
        if name not in self.gcs.objects:
            return self._answer(404)
        data, generation = self.gcs.objects[name]
        if query.get("ifGenerationNotMatch") == str(generation):
            return self._answer(304)
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return self._answer(412)
        told = {"x_goog_generation": str(generation)}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            return self._answer(200, data, **told)
        first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return self._answer(416)
        told["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._answer(206, data[first : last + 1], **told)

    def _list(self, query: dict[str, str]) -> None:
        first = query.get("pageToken") or query.get("startOffset", "")
        end, prefix = query.get("endOffset"), query.get("prefix", "")
        found = [
            name for name in self.gcs.names(prefix) if name >= first and (end is None or name < end)
        ]
        page, more = found[: self.gcs.page], found[self.gcs.page :]
        items = [{"name": n, "generation": str(self.gcs.objects[n][1])} for n in page]
        self._json({"items": items} | ({"nextPageToken": more[0]} if more else {}))

    def do_POST(self) -> None:
        path, query, body = self._parse()
        name = query.get("name", "")
        if self._refused(path, "write", name):
            return None
        expected = query.get("ifGenerationMatch")
        generation = self.gcs.write(name, body, None if expected is None else int(expected))
        if generation is None:
            return self._answer(412)
        return self._json({"name": name, "generation": str(generation), "size": str(len(body))})

    def do_DELETE(self) -> None:
        path, query, _ = self._parse()
        name = unquote(path.rpartition("/o/")[2])
        if self._refused(path, "delete", name):
            return
        expected = query.get("ifGenerationMatch")
        self._answer(self.gcs.delete(name, None if expected is None else int(expected)))


# --- for tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    with FakeGCS() as fake:
        os.environ.update(zip(ENVIRONMENT, (fake.url, "a token"), strict=True))
        yield fake
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def gcs(server):
    server.reset()
    yield server
    server.reset()


@pytest.fixture
def bucket(gcs):
    return Bucket(URL, QUICK)


def images_of(gcs, change):
    """What the bucket holds after each request of `change` that changes it, and before."""
    images = [dict(gcs.objects)]
    gcs.changed = lambda request, objects: images.append(objects)
    change()
    gcs.changed = lambda request, objects: None
    return images


def lay(gcs, image):
    gcs.objects.clear()
    gcs.objects.update(image)


def flip(gcs, name, offset=None):
    data = bytearray(gcs.objects[name][0])
    data[len(data) // 2 if offset is None else offset] ^= 1
    gcs.put(name, bytes(data))


def arrays_of(gcs, step):
    """The object that holds the bytes of the arrays of a step: the largest."""
    names = gcs.names(f"run/checkpoints/{step}/")
    return max(names, key=lambda name: len(gcs.objects[name][0]))


def markers(objects):
    return {name for name in objects if name.endswith(f"/{MARKER}") and name.count("/") == 3}
