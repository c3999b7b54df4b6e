"""Knowing at once that another process of the run has ended: an open connection from each of them to process 0.

The system closes a dead process's connections, so process 0 hears of it in milliseconds and tells the others, where
JAX's own heartbeats need most of their timeout, and then end every process with an abort and a stack of C++ frames
(docs/launch.md has the seconds). A host that is lost closes nothing: keep-alive probes notice that.

Lines on a connection, each way:
  hello TOKEN ID   a process's first, always as long; answered by `hello`
  end CODE         it has ended in order, as all others will; it waits for `bye`
  fail CODE        it ends with an error
  bye              to all: every process has ended, and may go
  lost TEXT        to all: stop now

Whoever reaches the port can connect, until all processes have. Before the right hello a connection is a stranger's:
nothing but those bytes is read of it, for some seconds, and it makes room for the next when there are many.
"""

import contextlib
import hmac
import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TextIO

# Seconds that the others get to end as well, after one has: with an error they mostly all find it (a wrong setting).
FAILED_PATIENCE = 5.0
ENDED_PATIENCE = 600.0
CONNECT_SECONDS = 30.0
HELLO_SECONDS = 5.0  # from its connection on, for a process to say hello; it does so at once
MOST_STRANGERS = 32  # connections without a hello: few beside the 256 descriptors of a strict system
MOST_LINE_BYTES = 4096
BACKLOG = 1024  # connections that the system holds ready: a run's processes come all at once
PAUSE_SECONDS = 0.1  # until what has just failed is tried again
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a lost host is noticed after 25 s

logger = logging.getLogger(__name__)


def ended_text(process: int, num_processes: int, how: str) -> str:
    """What all others say when one has ended."""
    return (
        f"process {process} of {num_processes} {how}; the run stops. The same command goes on from the last "
        "checkpoint, also on fewer processes"
    )


def _hello(token: str, process: int) -> bytes:
    """What a process says first. One length for all: no byte of it is judged before the last is there."""
    return f"hello {token} {process:08d}\n".encode()


@dataclass(kw_only=True)
class _Stranger:
    """A connection on which nobody has said the right hello yet."""

    deadline: float
    said: bytes = b""


@dataclass(kw_only=True)
class _Peer:
    """A process as process 0 sees it."""

    process: int
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
    _complete: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _deadline: tuple[float, str] | None = None  # when patience ends, and what is said then
    _one_failed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._servers = _listening(self.host)
        self.port: int = self._servers[0].getsockname()[1]
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        for server in self._servers:
            self._selector.register(server, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._listen, name="raggedmoe-peers", daemon=True)
        self._thread.start()

    def end(self, code: int, *, failed: bool) -> None:
        """Process 0 itself has ended."""
        self._ending.set()
        self._be_patient(0, code, failed or code != 0)

    def close_port(self) -> None:
        """Take no more connections: all processes have come, or will not."""
        self._complete.set()

    def close(self) -> None:
        """Listen no more."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._closed.is_set():
                ready = [key for key, _ in self._selector.select(timeout=0.1)]
                # Those who are here are heard before others come in, for whom they may have to go.
                for key in sorted(ready, key=lambda key: key.data == self._accept):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj.fileno() >= 0:  # else closed meanwhile
                        key.data(key.fileobj)
                self._send_away(stranger for stranger, s in self._strangers.items() if time.monotonic() > s.deadline)
                if self._complete.is_set():
                    self._stop_accepting()
                self._check_ends()
        except Exception as error:  # nobody would hear of a death any more
            self._lose(ended_text(0, self.num_processes, f"cannot hear the others any longer ({error!r})"))
        for each in (*self._servers, *self._strangers, *self._peers):
            each.close()
        self._selector.close()

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:  # mostly, no descriptor is left: those of strangers are the first to do without
            logger.debug("a connection is taken later: %s", error)
            if not self._strangers:
                time.sleep(PAUSE_SECONDS)
            self._send_away(self._strangers)
            return
        connection.setblocking(False)
        if len(self._strangers) == MOST_STRANGERS:
            self._send_away([next(iter(self._strangers))])
        self._strangers[connection] = _Stranger(deadline=time.monotonic() + HELLO_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ, self._admit)
        self._admit(connection)  # a process's hello is mostly here already

    def _admit(self, connection: socket.socket) -> None:
        """Hear more of a stranger's hello; who has said it right is a peer from then on."""
        stranger = self._strangers[connection]
        received = _received(connection, len(_hello(self.token, 0)) - len(stranger.said))
        if received is None:
            return
        stranger.said += received
        if not received:
            self._send_away([connection])
        elif len(stranger.said) == len(_hello(self.token, 0)):
            process = self._process_that_said(stranger.said)
            if process is None:
                self._send_away([connection])
                return
            del self._strangers[connection]
            self._peers[connection] = _Peer(process=process)
            self._selector.modify(connection, selectors.EVENT_READ, self._read)
            with contextlib.suppress(OSError):  # gone again: the next read says so
                _keep_alive(connection)
                connection.sendall(b"hello\n")

    def _process_that_said(self, hello: bytes) -> int | None:
        """The process whose hello this is; None: nobody's, or that of one who is here already."""
        number = hello[:-1].rpartition(b" ")[2]
        process = int(number) if number.isdigit() else 0
        known = 0 < process < self.num_processes
        if not hmac.compare_digest(hello, _hello(self.token, process)) or not known:
            return None
        return None if any(peer.process == process for peer in self._peers.values()) else process

    def _send_away(self, strangers: Iterable[socket.socket]) -> None:
        for connection in list(strangers):
            del self._strangers[connection]
            self._selector.unregister(connection)
            connection.close()

    def _stop_accepting(self) -> None:
        self._send_away(self._strangers)
        for server in self._servers:
            self._selector.unregister(server)
            server.close()
        self._servers = []

    def _read(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        received = _received(connection, MOST_LINE_BYTES - len(peer.unread))
        if received is None:
            return
        if not received:
            del self._peers[connection]
            self._selector.unregister(connection)
            connection.close()
            if not peer.ended:
                self._lose(ended_text(peer.process, self.num_processes, "has ended"))
            return
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        assert len(peer.unread) < MOST_LINE_BYTES, peer
        for line in lines:
            word, code = line.decode().split(" ")
            assert word in ("end", "fail"), line
            peer.ended = True
            self._be_patient(peer.process, int(code), word == "fail")

    def _be_patient(self, process: int, code: int, failed: bool) -> None:
        """From now on the others have so many seconds to end."""
        until = time.monotonic() + (FAILED_PATIENCE if failed else ENDED_PATIENCE)
        with self._lock:
            self._one_failed |= failed
            if self._deadline is None or until < self._deadline[0]:
                self._deadline = (until, ended_text(process, self.num_processes, f"has ended with code {code}"))

    def _check_ends(self) -> None:
        others_ended = all(peer.ended for peer in self._peers.values())
        if self._ending.is_set() and others_ended:
            if not self.all_ended.is_set():
                self._tell("bye")
                self.all_ended.set()
            if not self._peers:
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
        for connection in self._peers:
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
        self._connection, self._lines = self._answered()
        self._thread = threading.Thread(target=self._listen, name="raggedmoe-peers", daemon=True)
        self._thread.start()

    def _answered(self) -> tuple[socket.socket, TextIO]:
        """A connection on which process 0 has answered; tried again, as it sends one away when strangers press in."""
        until = time.monotonic() + CONNECT_SECONDS
        while True:
            connection = socket.create_connection(self.address, timeout=max(until - time.monotonic(), PAUSE_SECONDS))
            lines = connection.makefile("r", encoding="utf-8", errors="replace", newline="\n")
            try:
                _keep_alive(connection)
                connection.sendall(_hello(self.token, self.process))
                if lines.readline(MOST_LINE_BYTES) == "hello\n":
                    connection.settimeout(None)
                    return connection, lines
            except (ConnectionError, TimeoutError) as error:
                logger.debug("process 0 did not answer: %s", error)
            lines.close()
            connection.close()
            if time.monotonic() + PAUSE_SECONDS > until:
                raise ConnectionError(f"{self.address[0]}:{self.address[1]} did not answer as process 0 does")
            time.sleep(PAUSE_SECONDS)

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
            line = self._lines.readline(MOST_LINE_BYTES)
        except OSError:
            line = ""
        if line != "bye\n":
            text = line.removeprefix("lost ").strip()
            self.lost(text or ended_text(0, self.num_processes, "has ended"))
        self.all_ended.set()
        self.all_gone.set()  # for whom this process waits: none but process 0 needs to


def _listening(host: str) -> list[socket.socket]:
    """Sockets at the addresses where all look for process 0, on one port; everywhere, if this machine has none of them.

    It has none where an address is translated on its way (a cluster's virtual one, a container's forwarded port). And a
    name that is a loopback address here, as some systems write their own into /etc/hosts, is another one elsewhere.
    """
    servers: list[socket.socket] = []
    for family, address in _addresses(host):
        with contextlib.suppress(OSError):
            port = servers[0].getsockname()[1] if servers else 0
            servers.append(socket.create_server((address, port), family=family, backlog=BACKLOG))
    if not servers:
        logger.warning(
            "process 0 is looked for at %s, which is no address of this machine; it listens at every one", host
        )
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        servers.append(socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=dual))
    for server in servers:
        server.setblocking(False)
    return servers


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """What a host is called by number, without loopback addresses unless it is one by its own name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    numbers = [(family, str(address[0])) for family, _, _, _, address in found]
    is_number = host in [number for _, number in numbers]
    return [
        (family, number)
        for family, number in dict.fromkeys(numbers)
        if is_number or host == "localhost" or not ipaddress.ip_address(number).is_loopback
    ]


def _received(connection: socket.socket, most: int) -> bytes | None:
    """What has come on a connection; None: nothing yet; empty: it is closed."""
    try:
        return connection.recv(most)
    except BlockingIOError:
        return None
    except OSError:  # reset, or the probes of a lost host were not answered
        return b""


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
