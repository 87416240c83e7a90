"""Hosts on one machine: network namespaces on a switch, each with a link of a given speed.

    with network(["1gbit", "1gbit", "2gbit"]) as hosts:
        hosts[0].address                      # reachable from the other hosts
        enter(hosts[1].name)                  # this thread, and what it starts from now on, lives on that host
        subprocess.run(["ip", "netns", "exec", hosts[2].name, ...])

Needs root, ``ip`` and ``tc``; nothing is made outside the namespaces, and all of them are gone afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network namespace with one device, ``eth0``."""

    name: str
    """Of the namespace."""
    address: str
    rate: str
    """Of its link, each way, as tc writes it."""


def unavailable() -> str:
    """Why no network can be made here, as far as one can see without trying; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root; run as root, or in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"{' and '.join(missing)} not found; install iproute2" if missing else ""


@contextlib.contextmanager
def network(rates: list[str], burst: str = "256kb", latency: str = "50ms") -> Iterator[list[Host]]:
    """Hosts that reach each other, one a rate; a token bucket limits each link in both directions.

    Raises:
        RuntimeError: no root, no ``ip`` or ``tc``, or a kernel that refuses; what was made until then is removed.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    prefix = f"fl{secrets.token_hex(3)}"
    switch = f"{prefix}-switch"
    hosts = [
        Host(name=f"{prefix}-{index}", address=f"10.77.{index // 250}.{index % 250 + 1}", rate=rate)
        for index, rate in enumerate(rates)
    ]
    names = [switch, *(host.name for host in hosts)]
    with contextlib.ExitStack() as namespaces:
        namespaces.enter_context(_guard(names))
        for name in names:
            namespaces.callback(_remove, name)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for index, host in enumerate(hosts):
            _plug(switch, f"port{index}", host, ["burst", burst, "latency", latency])
        yield hosts


def enter(name: str) -> None:
    """The calling thread lives in the namespace, and so do the threads and processes that it starts from now on.

    Raises:
        OSError: there is no such namespace, or this process may not enter it.
    """
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _guard(names: list[str]) -> Iterator[None]:
    """Should this process be killed, another one removes the namespaces: it sees the pipe between the two end."""
    script = 'cat > /dev/null; for name in "$@"; do ip netns delete "$name"; done'
    command = ["sh", "-c", script, "guard", *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True):
        yield


def _plug(switch: str, port: str, host: Host, bucket: list[str]) -> None:
    """A cable from the host to the switch, limited where packets enter it, at either end."""
    peer = ["peer", "name", "eth0", "netns", host.name]
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
    _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/16", "dev", "eth0")
    _run("ip", "-n", host.name, "link", "set", "eth0", "up")
    _run("ip", "-n", host.name, "route", "add", "default", "dev", "eth0")  # so that a host can ask for its own address
    for name, device in ((switch, port), (host.name, "eth0")):
        _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", host.rate, *bucket)


def _remove(name: str) -> None:
    """The namespace is gone, if it was made; devices in it go with it."""
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)!r} failed: {done.stderr.strip() or done.stdout.strip()}")
