"""The sockets that a receiver listens on: one TCP port of the node's own address, and a unix socket without a file."""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from verl_fl._errors import explain

_BACKLOG = 128


class Listener:
    """Accepts in a thread of its own; the port is held from here on until :meth:`close`.

    Args:
        host: address to listen on; None: this node's own.
        ports: first and last that may be taken; None: any.
        accepted: called with each new socket and its peer's name.

    Attributes:
        address: ``tcp://host:port``.
        unix: name of the abstract unix socket; ``""`` where the system has none.
    """

    def __init__(
        self,
        host: str | None,
        ports: tuple[int, int] | None,
        accepted: Callable[[socket.socket, str], None],
    ) -> None:
        host = host or own_address()
        self._tcp = _bind(host, ports)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{shown}:{self._tcp.getsockname()[1]}"
        self._sockets, self.unix = [self._tcp], ""
        try:
            unix, name = socket.socket(socket.AF_UNIX), f"verl-fl-{secrets.token_hex(12)}"
            unix.bind("\0" + name)
            self._sockets.append(unix)
            self.unix = name
        except (OSError, AttributeError):
            pass  # not Linux: there is always tcp
        self._accepted = accepted
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="verl-fl-listen", daemon=True)
        for sock in self._sockets:
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        self._thread.start()

    def close(self) -> None:
        """Give the port back. Idempotent."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
            self._wake.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in (*self._sockets, self._woken):
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        for sock in (*self._sockets, self._woken):
                            sock.close()
                        return
                    self._accept(key.fileobj)  # type: ignore[arg-type]

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, peer = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                time.sleep(0.05)  # it still waits, and will be taken once there is room again
            return  # else it was gone before it was taken
        sock.setblocking(True)
        self._accepted(sock, f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a process on this host")


def own_address() -> str:
    """This node's address as other nodes see it; loopback where there is no network. Sends nothing."""
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                return probe.getsockname()[0]
        except OSError:
            continue
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1"
    except OSError:
        return "::1"


def _bind(host: str, ports: tuple[int, int] | None) -> socket.socket:
    first, last = ports or (0, 0)
    if not (0 <= first <= last < 65536) or (ports and first == 0):
        raise ValueError(explain("no range of ports", asked=f"{first}-{last}", legal="1 <= first <= last <= 65535"))
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, first, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            explain(f"{host!r} is no address: {error.strerror}", fix="pass one of this node's own")
        ) from error
    failure: OSError | None = None
    for port in range(first, last + 1):
        sock = socket.socket(family, kind, protocol)
        try:
            # A port on which old connections still linger is free; one on which somebody listens is not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((place[0], port, *place[2:]))
            sock.listen(_BACKLOG)
            return sock
        except OSError as error:
            sock.close()
            failure = error
            if error.errno == errno.EADDRNOTAVAIL:
                raise RuntimeError(
                    explain(f"{host} is an address of another node", fix="leave host out, or pass one of `ip addr`")
                ) from error
    assert failure is not None
    raise RuntimeError(
        explain(
            f"no port is free on {host}: {failure.strerror}",
            asked=f"ports {first} to {last}",
            legal="at least one free port for each receiver on the node",
            fix="widen the range, or end what listens there (`ss -ltnp`)",
        )
    ) from failure
