"""Problems for aiter's decoding and matrix objects: paged attention, MLA, a matrix product."""

from __future__ import annotations

import numpy as np

from objects.problems import UNITS, Operands, Problem, softmax, unwritten


def paged(arch: str, lengths: list[int], heads: int = 8, heads_k: int = 1) -> Problem:
    """pa_bf16_noquant: one query a sequence, pages of 16 tokens in a shuffled order.

    Keys lie as (page, head, dim / 8, token, 8), values as (page, head, token / 8, dim, 8).
    """
    operands, d, page, x = Operands(arch), 128, 16, 8
    counts = [-(-n // page) for n in lengths]
    pages = sum(counts) + 3
    q, qf = operands.make("bf16", len(lengths), heads, d)
    k, kf = operands.make("bf16", pages, heads_k, d // x, page, x)
    v, vf = operands.make("bf16", pages, heads_k, page // x, d, x)
    order = operands.rng.permutation(pages).astype(np.int32)
    table = np.zeros((len(lengths), max(counts)), np.int32)
    o, wanted = unwritten(len(lengths), heads, d), np.zeros((len(lengths), heads, d))
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        at = order[sum(counts[:b]) :][:count]
        table[b, :count] = at
        keys = kf[at].transpose(1, 0, 3, 2, 4).reshape(heads_k, -1, d)[:, :n]
        values = vf[at].transpose(1, 0, 2, 4, 3).reshape(heads_k, -1, d)[:, :n]
        grouped = qf[b].reshape(heads_k, -1, d)
        p, _ = softmax(d**-0.5 * grouped @ keys.swapaxes(1, 2))
        wanted[b] = (p @ values).reshape(heads, d)
    scale = np.float32(np.log2(np.e) * d**-0.5)
    slots = [o, q, k, v, table, np.array(lengths, np.int32), None, None, scale, table.shape[1]]
    slots += [heads_k, q.strides[0], k.strides[0], k.strides[1], 0, heads // heads_k, None]
    outputs = {"o": (o, "bf16", wanted, UNITS["bf16"])}
    return Problem((heads_k, len(lengths)), slots, outputs, 256)


def latent(arch: str, lengths: list[int], queries: int = 1, splits: int = 1) -> Problem:
    """mla_a16w16_qh16: 16 heads over latent keys of 512 and 64, of which the 512 are the values;
    splits of the keys leave float32 parts, which are merged here."""
    operands, heads, d, dv = Operands(arch), 16, 576, 512
    batch, total = len(lengths), sum(lengths) + 5
    q, qf = operands.make("bf16", batch * queries, heads, d)
    kv, kvf = operands.make("bf16", total, 1, 1, d)
    places = operands.rng.permutation(total)[: sum(lengths)].astype(np.int32)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    shape = (batch * queries, splits, heads)
    parts = np.full((*shape, dv), np.nan, np.float32) if splits > 1 else unwritten(*shape, dv)
    lse = np.full((*shape, 1), np.nan, np.float32)
    wanted, wanted_lse = np.zeros((batch * queries, heads, dv)), np.zeros((batch * queries, heads))
    scale = d**-0.5
    for b in range(batch):
        keys = kvf[places[starts[b] : starts[b + 1]], 0, 0]
        for t in range(queries):
            seen = keys[: lengths[b] - queries + 1 + t]
            p, wanted_lse[b * queries + t] = softmax(scale * qf[b * queries + t] @ seen.T)
            wanted[b * queries + t] = p @ seen[:, :dv]
    ones = np.ones(batch, np.int32)
    counts = np.arange(batch + 1, dtype=np.int32)
    slots = [parts, lse, q, kv, starts, places, ones, np.float32(scale), heads * queries, splits]
    slots += [queries * q.strides[0], kv.strides[0], 0, queries * counts, splits * counts]
    slots += [None, None, None, int(splits == 1), None]
    problem = Problem((-(-heads * queries // 128), batch, splits), slots, {}, 256)

    def merge():
        if splits == 1:
            problem.outputs["o"] = (parts[:, 0], "bf16", wanted, UNITS["bf16"])
            return
        weight = np.exp(lse[:, :, :, 0].astype(np.float64) - wanted_lse[:, None])
        merged = (weight[..., None] * parts).sum(1)
        problem.outputs["o"] = (merged, "f32", wanted, UNITS["bf16"])

    problem.after.append(merge)
    return problem


def product(
    arch: str, m: int, n: int, k: int, tile: tuple[int, int] = (32, 64), out: str = "bf16"
) -> Problem:
    """bf16gemm: D = A B^T with A (m, k) and B (n, k)."""
    make = Operands(arch).make
    (a, af), (b, bf) = make("bf16", m, k), make("bf16", n, k)
    d = unwritten(m, n) if out == "bf16" else np.full((m, n), np.nan, np.float32)
    slots = [d, None, a, b, np.float32(1), np.float32(0), d.strides[0], 0, d.strides[0], 0]
    slots += [a.strides[0], 0, b.strides[0], 0, m, n, k, 1, int(out == "bf16"), None, 0, None]
    outputs = {"d": (d, out, af @ bf.T, UNITS["bf16"])}
    return Problem((-(-n // tile[1]), -(-m // tile[0])), slots, outputs, 256)
