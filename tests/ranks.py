"""A shared pool of ranks (gloo, or NCCL on CUDA): spawned once, rebuilt after any failure.

A test calls `ranks(n)(function, *args)`; the function is module-level, gets a RankContext first
and runs on every rank with an initialised process group. Results come back by rank. Each call has a
hard deadline; when it fires, what every rank said or did not say is printed.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

DEADLINE_S = 60.0
GLOO_TIMEOUT_S = 20.0


@dataclass
class RankContext:
    """What a function on a rank needs to know."""

    rank: int
    world: int
    device: str = "cpu"
    meshes: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    def mesh(self, *, replicate: int = 1, shard: int | None = None, tp: int = 1) -> Any:
        """Return the mesh of these degrees, built once per pool."""
        from rayzero.dist.mesh import build_mesh

        shard = self.world // (replicate * tp) if shard is None else shard
        key = (replicate, shard, tp)
        if key not in self.meshes:
            self.meshes[key] = build_mesh(self.device, replicate=replicate, shard=shard, tp=tp)
        return self.meshes[key]

    def built(self, device_type: str, *, replicate: int, shard: int, tp: int) -> Any:
        """Stand in for build_mesh."""
        assert device_type == self.device
        return self.mesh(replicate=replicate, shard=shard, tp=tp)


class RankError(AssertionError):
    """A rank raised, died or hung; the text holds every rank's story."""


class Pool:
    """`world` processes with one group for life, on devices of one type."""

    def __init__(self, world: int, device: str = "cpu") -> None:
        self.world = world
        self.device = device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(
        self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
    ) -> list[Any]:
        """Run function(context, *args) on all ranks; return results by rank."""
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        results = self._collect(time.monotonic() + deadline_s)
        bad = {r: v for r, (ok, v) in results.items() if not ok}
        for rank in range(self.world):
            if rank not in results:
                dead = not self._processes[rank].is_alive()
                code = self._processes[rank].exitcode
                bad[rank] = f"died with exit code {code}" if dead else "no answer by the deadline"
        if bad:
            self.close()
            stories = "\n".join(f"--- rank {r}\n{text}" for r, text in sorted(bad.items()))
            raise RankError(f"{function.__name__} failed on {sorted(bad)}\n{stories}")
        self._signal(signal.SIGSTOP)
        return [results[r][1] for r in range(self.world)]

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _signal(self, number: int) -> None:
        """Stop ranks between calls: gloo's idle threads would wake up 100 times a second each."""
        for process in self._processes:
            os.kill(process.pid, number)

    def _collect(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        results: dict[int, tuple[bool, Any]] = {}
        while len(results) < self.world and time.monotonic() < deadline:
            open_pipes = {p: r for r, p in enumerate(self._pipes) if r not in results}
            for pipe in wait(list(open_pipes), timeout=0.2):
                rank = open_pipes[pipe]
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    results[rank] = (False, f"died: exit code {self._processes[rank].exitcode}")
            if any(not ok for ok, _ in results.values()):
                deadline = min(deadline, time.monotonic() + 1.0)
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rayzero.train.cell", "rayzero.engine.state.loading"])
        self._folder = tempfile.TemporaryDirectory(prefix="rayzero-ranks-")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world, self.device, theirs, self._folder.name),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, world: int, device: str, pipe: Connection, folder: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from rayzero.dist.process import backend_of

    torch.set_num_threads(1)
    if device == "cuda":
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(folder, "store"), world)
    timeout = timedelta(seconds=GLOO_TIMEOUT_S)
    dist.init_process_group(
        backend_of(device), store=store, rank=rank, world_size=world, timeout=timeout
    )
    context = RankContext(rank=rank, world=world, device=device)
    if importlib.util.find_spec("omegaconf") is not None:
        reuse_meshes(context)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        torch.manual_seed(0)
        try:
            answer = (True, function(context, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(answer))


def reuse_meshes(context: RankContext) -> None:
    """Let cells that follow each other share meshes.

    A mesh that nobody destroys leaves threads of gloo behind, which wake up 100 times a second.
    """
    for name in ("rayzero.train.build", "rayzero.train.observe"):
        importlib.import_module(name).build_mesh = context.built  # type: ignore[attr-defined]


class Pools:
    """The pools of a test session, by number of ranks."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        """Return the pool of this many ranks."""
        if world not in self._pools:
            self._pools[world] = Pool(world, self.device)
        return self._pools[world]

    def close(self) -> None:
        """Kill all pools."""
        for pool in self._pools.values():
            pool.close()
