"""An object store on loopback (moto's S3 server), which tests have refuse, delay and cut requests, or be away."""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from raggedmoe.storage import ObjectPath

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}
OTHER_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION")
_buckets = itertools.count()


@dataclass
class Fault:
    """What happens to requests of a method whose path matches."""

    method: str  # a regular expression, as is the path
    path: str
    kind: str  # "refuse" (403), "busy" (503), "cut" before it is served, "mute" after, "serve" after so many seconds
    times: int = 10**9
    seconds: float = 0.0
    after: "Fault | None" = None  # not before that one was seen
    until: threading.Event | None = None  # it waits for that first
    seen: int = 0

    def takes(self, method: str, path: str) -> bool:
        if self.after is not None and not self.after.seen:
            return False
        if self.seen >= self.times or not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self.seen += 1
        return True


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Say nothing."""


class ObjectServer:
    """The server, with its faults. What it stores outlives `away`."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._one_change = threading.Lock()
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.ignored_headers: list[str] = []
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url, "RAGGEDMOE_STORAGE_SECONDS": "30"}

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self._port, self._serve, threaded=True, request_handler=_Handler)
        self._server.daemon_threads = True
        self._port = self._server.port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on, and cut those that there are."""
        self._server.shutdown()
        self._server.server_close()
        self.faults.append(Fault(".*", "", "cut"))

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.come_back()

    def come_back(self) -> None:
        self.faults.pop()
        self.start()

    def away_for(self, seconds: float) -> threading.Thread:
        """Be away from now on for so long, while the test goes on."""
        self.stop()

        def come_back_later() -> None:
            time.sleep(seconds)
            self.come_back()

        thread = threading.Thread(target=come_back_later)
        thread.start()
        return thread

    @contextlib.contextmanager
    def fault(self, method: str, path: str, kind: str, **options: Any) -> Iterator[Fault]:
        fault = Fault(method, path, kind, **options)
        self.faults.append(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    def count(self, method: str, path: str = "") -> int:
        return sum(re.fullmatch(method, m) is not None and re.search(path, p) is not None for m, p in self.requests)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        for name in self.ignored_headers:
            environ.pop(name, None)
        fault = next((fault for fault in tuple(self.faults) if fault.takes(method, path)), None)
        if fault is not None and fault.until is not None:
            fault.until.wait()
        if fault is not None and fault.kind in ("refuse", "busy"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden" if fault.kind == "refuse" else "503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if fault is not None and fault.kind == "cut":
            return self._cut(environ, start_response)
        if fault is not None:
            time.sleep(fault.seconds)
        with self._one_change:  # the conditions of moto's writes are checked and kept in two steps
            answer = b"".join(self._moto(environ, start_response))
        if fault is not None and fault.kind == "mute":
            return self._cut(environ, start_response)
        return [answer]

    def _cut(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        environ["werkzeug.socket"].shutdown(2)
        start_response("500 Cut", [])
        return [b""]


@pytest.fixture(scope="session")
def _object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.stop()


@pytest.fixture
def object_server(_object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """The server, which this process and those that it starts find by the environment."""
    for name in OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in _object_server.environment.items():
        monkeypatch.setenv(name, value)
    _object_server.requests.clear()
    assert not _object_server.faults
    return _object_server


@pytest.fixture
def bucket(object_server: ObjectServer) -> ObjectPath:
    """A new bucket."""
    import urllib.request

    path = ObjectPath(f"bucket-{next(_buckets)}", "")
    request = urllib.request.Request(
        f"{object_server.url}/{path.bucket_name}", b"", {"Content-Length": "0"}, method="PUT"
    )
    urllib.request.urlopen(request).close()
    return path
