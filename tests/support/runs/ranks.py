"""Processes that are the ranks of a group, over gloo or NCCL, for as many tests as want them."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = ["numpy", "torch", "torch.distributed", "heedful.torch", "heedful.distributed"]


class Ranks:
    """So many ranks. folder: where they meet; seconds: how long one waits for another; backend:
    "gloo", or "nccl", with a GPU each; environ: variables that their processes have."""

    def __init__(
        self,
        count: int,
        folder: Path,
        seconds: float = 60.0,
        backend: str = "gloo",
        environ: dict[str, str] | None = None,
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "support.problems.budget"])
        self._pipes, self.processes = [], []
        for rank in range(count):
            mine, its = context.Pipe()
            told = (its, rank, count, str(folder / "store"), seconds, backend, environ or {})
            process = context.Process(target=_serve, args=told, daemon=True)
            process.start()
            its.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank, ranks, *args) on every rank: what each returned. Raises AssertionError
        with what any of them raised."""
        found = self.outcomes(function, *args)
        wrong = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(found) if said]
        assert not wrong, "\n".join(wrong)
        return [value for _, value in found]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """By rank what it raised, as text, "" for nothing, and what it returned."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return [_answer(pipe) for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()


def _answer(pipe: Connection) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return "ended", None


def _serve(
    pipe: Connection,
    rank: int,
    count: int,
    store: str,
    seconds: float,
    backend: str,
    environ: dict[str, str],
) -> None:
    os.environ.update(environ)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=seconds),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = "", function(rank, count, *args)
        except BaseException as error:  # is told, not lost
            words = "".join(traceback.format_exception_only(error)).strip()
            answer = f"{words}\n{traceback.format_exc()}", None
        pipe.send(answer)
