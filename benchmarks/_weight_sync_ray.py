"""A Ray of the benchmark's own: its folder, its ports, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection


@contextlib.contextmanager
def own_ray(payload_bytes: int) -> Iterator[str]:
    """The address of a Ray on this machine whose object store holds two payloads.

    Empty where payload_bytes is 0, and where Ray does not start.
    """
    if not payload_bytes:
        yield ""
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    host = context.Process(target=_host, args=(theirs, 9 * payload_bytes // 4 + (200 << 20)))
    host.start()
    theirs.close()
    try:
        address = ""
        with contextlib.suppress(EOFError):  # its process has ended, and its error is on stderr
            address = ours.recv() if ours.poll(120) else ""
        yield address
    finally:
        ours.close()
        host.join(60)
        if host.is_alive():
            host.kill()


def _host(pipe: Connection, store_bytes: int) -> None:
    """Ray lives as long as the other end of the pipe, also when that end is killed."""
    import logging

    import psutil
    import ray

    os.setsid()  # a signal to the benchmark's group is the parent's to answer: Ray ends when the pipe does
    folder = tempfile.mkdtemp(prefix="ws-ray-")
    children: list[psutil.Process] = []
    try:
        ray.init(
            "local",
            num_cpus=0,
            object_store_memory=store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        children = psutil.Process().children(recursive=True)
        pipe.send(ray.get_runtime_context().gcs_address)
        with contextlib.suppress(EOFError):
            pipe.recv()
    finally:
        ray.shutdown()
        _, alive = psutil.wait_procs(children, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
