"""A small serving engine over vLLM's interface: continuous batching, chunked prefill, preemption by
recomputing, and speculative tokens that are verified. It schedules as vLLM does, and asks the
plug-in's classes for attention; a tiny model stands for the rest."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from support.integrations.tiny_model import LONGEST, Model


@dataclass
class Request:
    """A sequence. continued: what a model is known to say, from which drafts are taken. computed:
    how many of its tokens the cache has."""

    tokens: list[int]
    continued: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= len(self.continued)


class Engine:
    """layers: makes what attends, of this engine. budget: tokens of a step. most: sequences of a
    step. drafts: speculative tokens of a sequence. pads: whether each step has as many tokens and
    sequences, as steps by a CUDA graph have."""

    def __init__(
        self,
        model: Model,
        layers: Callable[["Engine"], Any],
        blocks: int = 24,
        block_size: int = 16,
        budget: int = 24,
        most: int = 4,
        drafts: int = 0,
        pads: bool = False,
        seed: int = 0,
    ):
        self.model, self.block_size, self.budget, self.most = model, block_size, budget, most
        self.drafts, self.pads, self.draws = drafts, pads, random.Random(seed)
        self.device = model.weights["embed"].device
        self.blocks = blocks
        self.free = list(range(blocks))
        self.draws.shuffle(self.free)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.events: set[str] = set()
        self.inputs = {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for name, shape, dtype in (
                ("tokens", (budget,), torch.int64),
                ("places", (budget,), torch.int64),
                ("slots", (budget,), torch.int64),
                ("starts", (most + 1,), torch.int32),
                ("lengths", (most,), torch.int32),
                ("table", (most, LONGEST // block_size), torch.int32),
            )
        }
        self.layers = layers(self)

    def run(self, requests: list[Request]) -> list[Request]:
        """Serves the requests, some of which come later than others."""
        self.waiting = list(requests)
        for _ in range(2000):
            if not (self.waiting or self.running):
                return requests
            self.step()
        raise AssertionError("the engine does not come to an end")

    def step(self) -> None:
        """One batch: chosen, computed, and its new tokens taken."""
        batch = self.scheduled()
        if len({count for _, count in batch}) > 1:
            self.events.add("mixed batch")
        logits = self.layers.run(batch, self.filled(batch))
        first = 0
        for request, count in batch:
            self.take(request, count, logits[first : first + count])
            first += count
        for request in [r for r in self.running if r.is_done]:
            self.drop(request)
            self.done.append(request)

    def scheduled(self) -> list[tuple[Request, int]]:
        """Sequences of a step and how many tokens of each; the fewest first."""
        room, batch = self.budget, []
        for request in list(self.running):
            if request not in self.running:
                continue
            if request.computed == len(request.tokens) - 1:
                request.draft = self.drafted(request)
            room -= self.admitted(request, room, batch)
        while self.waiting and len(self.running) < self.most and room and self.free:
            if self.draws.random() < 0.3 and self.running:
                break
            request = self.waiting.pop(0)
            self.running.append(request)
            room -= self.admitted(request, room, batch)
        # Sequences may have gone again.
        kept = [(request, count) for request, count in batch if request in self.running]
        return sorted(kept, key=lambda pair: pair[1])

    def admitted(self, request: Request, room: int, batch: list) -> int:
        """The tokens of a sequence that this step computes, for which it now has blocks."""
        known = len(request.tokens) + len(request.draft)
        count = min(known - request.computed, room)
        while len(request.blocks) * self.block_size < request.computed + count:
            if self.free:
                request.blocks.append(self.free.pop())
                continue
            victim = self.running[-1]
            self.events.add("preemption")
            self.drop(victim)
            self.waiting.insert(0, victim)
            if victim is request:
                return 0
        if request.computed + count < len(request.tokens):
            self.events.add("chunked prefill")
        if count:
            batch.append((request, count))
        return count

    def drafted(self, request: Request) -> list[int]:
        """Tokens that may follow; some of them do."""
        begin = len(request.tokens)
        right = request.continued[begin : begin + self.drafts]
        return [t if self.draws.random() < 0.7 else (t + 1) % 7 for t in right]

    def drop(self, request: Request) -> None:
        self.running.remove(request)
        self.free += request.blocks
        self.draws.shuffle(self.free)
        request.blocks, request.computed, request.draft = [], 0, []

    def take(self, request: Request, count: int, logits: Tensor) -> None:
        """Keeps logits of the tokens that are the sequence's own, and adds those that follow."""
        last = len(request.tokens) - 1
        for row in logits:
            place = request.computed
            if place >= len(request.tokens):
                break
            request.logits[place] = row
            request.computed += 1
            if place < last:
                continue
            token, draft = int(row.argmax()), request.draft
            request.tokens.append(token)
            if request.is_done or not draft:
                break
            if draft.pop(0) != token:
                self.events.add("rejected draft")
                break
            self.events.add("accepted draft")
        request.draft = []

    def filled(self, batch: list[tuple[Request, int]]) -> SimpleNamespace:
        """The step as vLLM's CommonAttentionMetadata has it, over buffers that stay."""
        counts = [count for _, count in batch]
        used, given = len(batch), sum(counts)
        sizes = (self.most, self.budget) if self.pads else (used, given)
        x = {name: torch.zeros_like(buffer, device="cpu") for name, buffer in self.inputs.items()}
        x["slots"].fill_(-1)
        starts = torch.tensor([0, *counts]).cumsum(0)
        x["starts"][: used + 1], x["starts"][used + 1 :] = starts, given
        for row, (request, count) in enumerate(batch):
            known = request.tokens + request.draft
            for at in range(count):
                place, to = request.computed + at, int(starts[row]) + at
                block = request.blocks[place // self.block_size]
                x["tokens"][to], x["places"][to] = known[place], place
                x["slots"][to] = block * self.block_size + place % self.block_size
            x["lengths"][row] = request.computed + count
            x["table"][row, : len(request.blocks)] = torch.tensor(request.blocks)
        for name, buffer in self.inputs.items():
            buffer.copy_(x[name])
        return self.batch_of(*sizes, max(counts), int(x["lengths"].max()))

    def batch_of(self, used: int, given: int, longest: int, most: int) -> SimpleNamespace:
        """The fields of CommonAttentionMetadata for so many sequences and tokens."""
        x = self.inputs
        return SimpleNamespace(
            query_start_loc=x["starts"][: used + 1],
            query_start_loc_cpu=x["starts"][: used + 1].cpu(),
            seq_lens=x["lengths"][:used],
            num_reqs=used,
            num_actual_tokens=given,
            max_query_len=longest,
            max_seq_len=most,
            block_table_tensor=x["table"][:used],
            slot_mapping=x["slots"][:given],
        )
