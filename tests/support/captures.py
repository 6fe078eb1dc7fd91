"""Graphs of a GPU's work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def graph_capture(graph: "torch.cuda.CUDAGraph", **options: Any) -> Iterator[None]:
    """As torch.cuda.graph, and nothing is garbage collected meanwhile: a graph in a cycle that is
    destroyed while another is captured ends that capture with CUDA error 901 (pytorch#161037)."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if collects:
            gc.enable()
