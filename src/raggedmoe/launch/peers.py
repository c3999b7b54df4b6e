"""Connections from every process of a run to process 0, by which all learn at once that one has ended.

The system closes a dead process's connections, so process 0 hears of it in milliseconds and tells the others, where
JAX's own heartbeats need most of their timeout, and then end every process with an abort and a stack of C++ frames
(docs/launch.md has the seconds). A host that is lost closes nothing: keep-alive probes notice that.

The protocol has these lines:
  hello TOKEN ID   a process's first line, of fixed length; process 0 answers with `hello`
  end CODE         the process has ended in order, as all others will; it waits for `bye`
  fail CODE        the process ends with an error
  bye              from process 0 to all: every process has ended, and may exit
  lost TEXT        from process 0 to all: stop now

Whoever reaches the port can connect, until all processes have. Before the right hello a connection is pending: process
0 reads nothing but those bytes from it, for some seconds, and drops it for a newer one when there are many.
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

# Seconds that the others get to end as well, after one has. After an error mostly all find it (a wrong setting).
FAILED_GRACE_SECONDS = 5.0
ENDED_GRACE_SECONDS = 600.0
CONNECT_SECONDS = 30.0
HELLO_SECONDS = 5.0  # from its connection on, for a process to say hello; it does so at once
MAX_PENDING = 32  # connections without a hello: few beside the 256 descriptors of a strict system
MAX_LINE_BYTES = 4096
BACKLOG = 1024  # connections that the system holds ready: a run's processes come all at once
RETRY_SECONDS = 0.1  # until what has just failed is tried again
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a lost host is noticed after 25 s

logger = logging.getLogger(__name__)


def end_message(process: int, num_processes: int, how: str) -> str:
    """Say that a process has ended; all others print this."""
    return (
        f"process {process} of {num_processes} {how}; the run stops. The same command goes on from the last "
        "checkpoint, also on fewer processes"
    )


def _hello_line(token: str, process: int) -> bytes:
    """Make a process's first line. All have one length, so that no byte is compared before the last has come."""
    return f"hello {token} {process:08d}\n".encode()


@dataclass(kw_only=True)
class _PendingConnection:
    """A connection that has not sent the right hello yet."""

    deadline: float
    hello: bytes = b""


@dataclass(kw_only=True)
class _Peer:
    """Another process, as process 0 sees it."""

    process: int
    unread: bytes = b""
    ended: bool = False


@dataclass(kw_only=True)
class Hub:
    """The side of process 0, which listens to every other process, and tells all of them when one is lost."""

    num_processes: int
    token: str
    host: str
    on_lost: Callable[[str], None]  # ends this process, in the thread that listens
    all_ended: threading.Event = field(default_factory=threading.Event)
    all_gone: threading.Event = field(default_factory=threading.Event)
    _ending: threading.Event = field(default_factory=threading.Event)
    _complete: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _deadline: tuple[float, str] | None = None  # when the others must have ended, and what is said if not
    _one_failed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._servers = _open_servers(self.host)
        self.port: int = self._servers[0].getsockname()[1]
        self._pending: dict[socket.socket, _PendingConnection] = {}  # the oldest first
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        for server in self._servers:
            self._selector.register(server, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._listen, name="raggedmoe-peers", daemon=True)
        self._thread.start()

    def end(self, code: int, *, failed: bool) -> None:
        """Say that process 0 itself has ended."""
        self._ending.set()
        self._set_deadline(0, code, failed or code != 0)

    def close_port(self) -> None:
        """Accept no more connections, as all processes have come, or will not."""
        self._complete.set()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._closed.is_set():
                ready = [key for key, _ in self._selector.select(timeout=0.1)]
                # Open connections are read before new ones are accepted, for which they may have to be dropped.
                for key in sorted(ready, key=lambda key: key.data == self._accept):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj.fileno() >= 0:  # else closed meanwhile
                        key.data(key.fileobj)
                self._drop_pending(
                    connection for connection, pending in self._pending.items() if time.monotonic() > pending.deadline
                )
                if self._complete.is_set():
                    self._stop_accepting()
                self._check_ends()
        except Exception as error:  # no process would learn any more that another has ended
            self._report_lost(end_message(0, self.num_processes, f"cannot hear the others any longer ({error!r})"))
        for sock in (*self._servers, *self._pending, *self._peers):
            sock.close()
        self._selector.close()

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:  # mostly, no descriptor is left: pending connections are dropped first
            logger.debug("a connection is taken later: %s", error)
            if not self._pending:
                time.sleep(RETRY_SECONDS)
            self._drop_pending(self._pending)
            return
        connection.setblocking(False)
        if len(self._pending) == MAX_PENDING:
            self._drop_pending([next(iter(self._pending))])
        self._pending[connection] = _PendingConnection(deadline=time.monotonic() + HELLO_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ, self._admit)
        self._admit(connection)  # a process's hello is mostly here already

    def _admit(self, connection: socket.socket) -> None:
        """Read more of a pending connection's hello. Once the right hello is complete, the connection is a peer's."""
        pending = self._pending[connection]
        received = _receive(connection, len(_hello_line(self.token, 0)) - len(pending.hello))
        if received is None:
            return
        pending.hello += received
        if not received:
            self._drop_pending([connection])
        elif len(pending.hello) == len(_hello_line(self.token, 0)):
            process = self._authenticate(pending.hello)
            if process is None:
                self._drop_pending([connection])
                return
            del self._pending[connection]
            self._peers[connection] = _Peer(process=process)
            self._selector.modify(connection, selectors.EVENT_READ, self._read)
            with contextlib.suppress(OSError):  # gone again: the next read says so
                _keep_alive(connection)
                connection.sendall(b"hello\n")

    def _authenticate(self, hello: bytes) -> int | None:
        """Return the process whose hello this is; None if it is wrong, or that process is connected already."""
        number = hello[:-1].rpartition(b" ")[2]
        process = int(number) if number.isdigit() else 0
        known = 0 < process < self.num_processes
        if not hmac.compare_digest(hello, _hello_line(self.token, process)) or not known:
            return None
        return None if any(peer.process == process for peer in self._peers.values()) else process

    def _drop_pending(self, connections: Iterable[socket.socket]) -> None:
        for connection in list(connections):
            del self._pending[connection]
            self._selector.unregister(connection)
            connection.close()

    def _stop_accepting(self) -> None:
        self._drop_pending(self._pending)
        for server in self._servers:
            self._selector.unregister(server)
            server.close()
        self._servers = []

    def _read(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        received = _receive(connection, MAX_LINE_BYTES - len(peer.unread))
        if received is None:
            return
        if not received:
            del self._peers[connection]
            self._selector.unregister(connection)
            connection.close()
            if not peer.ended:
                self._report_lost(end_message(peer.process, self.num_processes, "has ended"))
            return
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        assert len(peer.unread) < MAX_LINE_BYTES, peer
        for line in lines:
            word, code = line.decode().split(" ")
            assert word in ("end", "fail"), line
            peer.ended = True
            self._set_deadline(peer.process, int(code), word == "fail")

    def _set_deadline(self, process: int, code: int, failed: bool) -> None:
        """Start the seconds that the other processes have to end, after one has."""
        until = time.monotonic() + (FAILED_GRACE_SECONDS if failed else ENDED_GRACE_SECONDS)
        with self._lock:
            self._one_failed |= failed
            if self._deadline is None or until < self._deadline[0]:
                self._deadline = (until, end_message(process, self.num_processes, f"has ended with code {code}"))

    def _check_ends(self) -> None:
        others_ended = all(peer.ended for peer in self._peers.values())
        if self._ending.is_set() and others_ended:
            if not self.all_ended.is_set():
                self._broadcast("bye")
                self.all_ended.set()
            if not self._peers:
                self.all_gone.set()
        elif others_ended and not self._one_failed:
            return  # process 0 alone writes the model and ends checkpoints: that takes as long as it takes
        elif self._deadline is not None and time.monotonic() > self._deadline[0]:
            self._report_lost(self._deadline[1])

    def _report_lost(self, text: str) -> None:
        self._deadline = None  # it is said once
        self._broadcast(f"lost {text}")
        self.on_lost(text)
        self.all_ended.set()  # it goes on only where it is ending with an error of its own
        self.all_gone.set()

    def _broadcast(self, line: str) -> None:
        for connection in self._peers:
            with contextlib.suppress(OSError):  # that one is gone as well
                connection.sendall(f"{line}\n".encode())


@dataclass(kw_only=True)
class Member:
    """The side of every process but process 0."""

    process: int
    num_processes: int
    token: str
    address: tuple[str, int]  # where the hub listens
    on_lost: Callable[[str], None]
    all_ended: threading.Event = field(default_factory=threading.Event)
    all_gone: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._connection, self._lines = self._connect()
        self._thread = threading.Thread(target=self._listen, name="raggedmoe-peers", daemon=True)
        self._thread.start()

    def _connect(self) -> tuple[socket.socket, TextIO]:
        """Connect, and wait until process 0 answers. Try again if it drops the connection, as it may if many come."""
        until = time.monotonic() + CONNECT_SECONDS
        while True:
            connection = socket.create_connection(self.address, timeout=max(until - time.monotonic(), RETRY_SECONDS))
            lines = connection.makefile("r", encoding="utf-8", errors="replace", newline="\n")
            try:
                _keep_alive(connection)
                connection.sendall(_hello_line(self.token, self.process))
                if lines.readline(MAX_LINE_BYTES) == "hello\n":
                    connection.settimeout(None)
                    return connection, lines
            except (ConnectionError, TimeoutError) as error:
                logger.debug("process 0 did not answer: %s", error)
            lines.close()
            connection.close()
            if time.monotonic() + RETRY_SECONDS > until:
                raise ConnectionError(f"{self.address[0]}:{self.address[1]} did not answer as process 0 does")
            time.sleep(RETRY_SECONDS)

    def end(self, code: int, *, failed: bool) -> None:
        """Say that this process has ended."""
        with contextlib.suppress(OSError):  # process 0 is gone: the listening thread says so
            self._connection.sendall(f"{'fail' if failed else 'end'} {code}\n".encode())

    def close(self) -> None:
        """Close the connection, after all processes have ended."""
        with contextlib.suppress(OSError):  # closed by process 0 already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._lines.close()
        self._connection.close()

    def _listen(self) -> None:
        try:
            line = self._lines.readline(MAX_LINE_BYTES)
        except OSError:
            line = ""
        if line != "bye\n":
            text = line.removeprefix("lost ").strip()
            self.on_lost(text or end_message(0, self.num_processes, "has ended"))
        self.all_ended.set()
        self.all_gone.set()  # only process 0 has to wait for others to exit


def _open_servers(host: str) -> list[socket.socket]:
    """Listen on one port at the addresses where all look for process 0, or at every address if none is this machine's.

    It has none where an address is translated on its way (a cluster's virtual one, a container's forwarded port). And a
    name that is a loopback address here, as some systems write their own into /etc/hosts, is another one elsewhere.
    """
    servers: list[socket.socket] = []
    for family, address in _resolve_host(host):
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


def _resolve_host(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Resolve a host to its IP addresses, without loopback addresses unless the host was given as one."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    numbers = [(family, str(address[0])) for family, _, _, _, address in infos]
    is_number = host in [number for _, number in numbers]
    return [
        (family, number)
        for family, number in dict.fromkeys(numbers)
        if is_number or host == "localhost" or not ipaddress.ip_address(number).is_loopback
    ]


def _receive(connection: socket.socket, most: int) -> bytes | None:
    """Read what has come on a connection; None if nothing has yet, and no bytes if it is closed."""
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
