"""The rival Ray, and a Ray of the benchmark's own: its folder, its ports, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import _weight_sync_payloads as payloads
from _weight_sync_methods import Endpoint


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


class Ray(Endpoint):
    """One put into the object store by the sender, one get without a copy by each receiver, then into its model."""

    def open_sender(self) -> None:
        self.connect()

    def open_receiver(self) -> None:
        self.connect()

    def connect(self) -> None:
        """A driver of the benchmark's own Ray."""
        import logging

        import ray

        if not self.job.ray_address:
            raise RuntimeError("the benchmark's own Ray did not start")
        ray.init(self.job.ray_address, namespace="weight-sync", log_to_driver=False, logging_level=logging.ERROR)
        self.storages = payloads.storages(self.job.tensors)
        self.reference: Any = None

    def send(self, variant: str) -> None:
        import ray
        from ray import cloudpickle

        self.reference = ray.put([view.numpy() for view in self.storages])
        self.job.tell(cloudpickle.dumps(self.reference))

    def receive(self, variant: str) -> None:
        import warnings

        import ray
        import torch
        from ray import cloudpickle

        (message,) = self.job.hear()
        arrays = ray.get(cloudpickle.loads(message), timeout=self.job.timeout_s)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: "not writable"; it is only read
            for view, array in zip(self.storages, arrays, strict=True):
                view.copy_(torch.from_numpy(array))

    def received(self) -> list[payloads.Tensors]:
        self.reference = None  # frees the store's memory for the next put, outside of the timing
        return super().received()

    def close(self) -> None:
        import ray

        ray.shutdown()
