"""Knowing at once that another process of the run has ended: an open connection from each of them to process 0.

The system closes a dead process's connections, so process 0 hears of it in milliseconds and tells the others, where
JAX's own heartbeats need most of their timeout, and then end every process with an abort and a stack of C++ frames
(docs/launch.md has the seconds). A host that is lost closes nothing: keep-alive probes notice that.

Lines on a connection, each way:
  hello TOKEN ID   a process's first; answered by `hello`
  end CODE         it has ended in order, as all others will; it waits for `bye`
  fail CODE        it ends with an error
  bye              to all: every process has ended, and may go
  lost TEXT        to all: stop now
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Seconds that the others get to end as well, after one has: with an error they mostly all find it (a wrong setting).
FAILED_PATIENCE = 5.0
ENDED_PATIENCE = 600.0
CONNECT_SECONDS = 30.0
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a lost host is noticed after 25 s


def ended_text(process: int, num_processes: int, how: str) -> str:
    """What all others say when one has ended."""
    return (
        f"process {process} of {num_processes} {how}; the run stops. The same command goes on from the last "
        "checkpoint, also on fewer processes"
    )


@dataclass(kw_only=True)
class _Peer:
    """A process as process 0 sees it."""

    process: int | None = None  # known after its first line
    unread: bytes = b""
    ended: bool = False


@dataclass(kw_only=True)
class Hub:
    """Process 0's side: hears every other process, and tells all of them when one is lost."""

    num_processes: int
    token: str
    host: str
    lost: Callable[[str], None]  # ends this process, in the thread that listens
    all_ended: threading.Event = field(default_factory=threading.Event)
    all_gone: threading.Event = field(default_factory=threading.Event)
    _ending: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _deadline: tuple[float, str] | None = None  # when patience ends, and what is said then
    _one_failed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._server = _listening(self.host)
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._listen, name="raggedmoe-peers", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.getsockname()[1]

    def end(self, code: int, *, failed: bool) -> None:
        """Process 0 itself has ended."""
        self._ending.set()
        self._be_patient(0, code, failed or code != 0)

    def close(self) -> None:
        """Listen no more."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._closed.is_set():
                for key, _ in self._selector.select(timeout=0.1):
                    if key.fileobj is self._server:
                        self._accept()
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._read(key.fileobj)
                self._check_ends()
        except Exception as error:  # nobody would hear of a death any more
            self._lose(ended_text(0, self.num_processes, f"cannot hear the others any longer ({error!r})"))
        for each in (self._server, *self._peers):
            each.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except ConnectionError:  # it has gone again
            return
        _keep_alive(connection)
        self._peers[connection] = _Peer()
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            received = connection.recv(4096)
        except OSError:  # reset, or the probes of a lost host were not answered
            received = b""
        if not received:
            self._drop(connection)
            if peer.process is not None and not peer.ended:
                self._lose(ended_text(peer.process, self.num_processes, "has ended"))
            return
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        for line in lines:
            if connection in self._peers:
                self._heard(connection, peer, line.decode(errors="replace").split(" "))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._peers[connection]

    def _heard(self, connection: socket.socket, peer: _Peer, words: list[str]) -> None:
        if words[0] == "hello" and words[1:2] == [self.token]:
            peer.process = int(words[2])
            with contextlib.suppress(OSError):  # gone again: the next read says so
                connection.sendall(b"hello\n")
        elif peer.process is None:  # a stranger on this port
            self._drop(connection)
        else:
            assert words[0] in ("end", "fail"), words
            peer.ended = True
            self._be_patient(peer.process, int(words[1]), words[0] == "fail")

    def _be_patient(self, process: int, code: int, failed: bool) -> None:
        """From now on the others have so many seconds to end."""
        until = time.monotonic() + (FAILED_PATIENCE if failed else ENDED_PATIENCE)
        with self._lock:
            self._one_failed |= failed
            if self._deadline is None or until < self._deadline[0]:
                self._deadline = (until, ended_text(process, self.num_processes, f"has ended with code {code}"))

    def _check_ends(self) -> None:
        known = [peer for peer in self._peers.values() if peer.process is not None]
        others_ended = all(peer.ended for peer in known)
        if self._ending.is_set() and others_ended:
            if not self.all_ended.is_set():
                self._tell("bye")
                self.all_ended.set()
            if not known:
                self.all_gone.set()
        elif others_ended and not self._one_failed:
            return  # process 0 alone writes the model and ends checkpoints: that takes as long as it takes
        elif self._deadline is not None and time.monotonic() > self._deadline[0]:
            self._lose(self._deadline[1])

    def _lose(self, text: str) -> None:
        self._deadline = None  # it is said once
        self._tell(f"lost {text}")
        self.lost(text)
        self.all_ended.set()  # it goes on only where it is ending with an error of its own
        self.all_gone.set()

    def _tell(self, line: str) -> None:
        for connection, peer in self._peers.items():
            if peer.process is not None:
                with contextlib.suppress(OSError):  # that one is gone as well
                    connection.sendall(f"{line}\n".encode())


@dataclass(kw_only=True)
class Member:
    """Every other process's side."""

    process: int
    num_processes: int
    token: str
    address: tuple[str, int]  # of the hub
    lost: Callable[[str], None]
    all_ended: threading.Event = field(default_factory=threading.Event)
    all_gone: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._connection = socket.create_connection(self.address, timeout=CONNECT_SECONDS)
        _keep_alive(self._connection)
        self._connection.sendall(f"hello {self.token} {self.process}\n".encode())
        self._lines = self._connection.makefile("r", encoding="utf-8", newline="\n")
        if self._lines.readline() != "hello\n":
            self._lines.close()
            self._connection.close()
            raise ConnectionError(f"{self.address[0]}:{self.address[1]} did not answer as process 0 does")
        self._connection.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="raggedmoe-peers", daemon=True)
        self._thread.start()

    def end(self, code: int, *, failed: bool) -> None:
        """This process has ended."""
        with contextlib.suppress(OSError):  # process 0 is gone: the listening thread says so
            self._connection.sendall(f"{'fail' if failed else 'end'} {code}\n".encode())

    def close(self) -> None:
        """Listen no more; after all have ended."""
        with contextlib.suppress(OSError):  # closed by process 0 already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._lines.close()
        self._connection.close()

    def _listen(self) -> None:
        try:
            line = self._lines.readline()
        except OSError:
            line = ""
        if line != "bye\n":
            text = line.removeprefix("lost ").strip()
            self.lost(text or ended_text(0, self.num_processes, "has ended"))
        self.all_ended.set()
        self.all_gone.set()  # for whom this process waits: none but process 0 needs to


def _listening(host: str) -> socket.socket:
    """On this machine only, if that is where process 0 is found."""
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
