"""Attention longhand: one score at a time in plain Python, from the sentences of the documentation.
It shares no code with the package, so that what the oracle has wrong shows here.

Numbers may be complex: a step of 1e-200 i in an input comes out as the derivative, to all digits
(Squire and Trapp 1998), since everything here is analytic.
"""

import cmath
import math

from support.problems.cases import Case

WORD = 2**32


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def kept(case: Case, x: dict, b: int, h: int, i: int, j: int) -> bool:
    """Whether dropout keeps a probability."""
    seed, origin = x["seed"][0], case.dropout_origin
    if case.origins:
        # A sequence's own place stands for its number.
        *origin, column = x["origins"][b]
        origin, b = (*origin, column * case.origins), 0
    b, h, i, j = ((a + o) % WORD for a, o in zip((b, h, i, j), origin, strict=True))
    key = (seed % WORD, (seed >> 32) % WORD)
    return philox((j >> 2, i, h, b), key)[j & 3] < math.floor((1 - case.dropout_p) * WORD)


class Longhand:
    """A case's call on plain numbers: `x` maps operands' names to nested lists or None."""

    def __init__(self, case: Case, x: dict):
        self.case, self.x = case, x
        self.group = case.heads_q // case.heads_k
        self.dim_v = case.head_dim_v or case.head_dim
        self.scale = case.scale or 1 / math.sqrt(case.head_dim)

    # Where things are.

    def queries(self, b: int) -> tuple[int, int]:
        """(first token, how many) of a sequence's queries; unpacked, tokens count from the first
        of the batch."""
        bounds, used = self.x["cu_seqlens_q"], self.x["seqused_q"]
        first = b * self.case.seqlen_q if bounds is None else bounds[b]
        room = self.case.seqlen_q if bounds is None else bounds[b + 1] - first
        return first, room if used is None else used[b]

    def keys(self, b: int) -> int:
        """How many keys a sequence has."""
        bounds, used = self.x["cu_seqlens_k"], self.x["seqused_k"]
        if used is not None:
            return used[b]
        room = self.case.seqlen_k if bounds is None else bounds[b + 1] - bounds[b]
        return room - (self.x["leftpad_k"] or [0] * (b + 1))[b]

    def stored(self, name: str, b: int, j: int):
        """What stands for key j of a sequence in an array that lies as the keys do."""
        array, row = self.x[name], j + (self.x["leftpad_k"] or [0] * (b + 1))[b]
        if self.x["block_table"] is not None:
            size = self.case.page_size
            return array[self.x["block_table"][b][row // size]][row % size]
        if self.x["cu_seqlens_k"] is not None:
            return array[self.x["cu_seqlens_k"][b] + row]
        index = self.x["kv_batch_idx"]
        return array[b if index is None else index[b]][row]

    def query(self, b: int, i: int, h: int) -> list:
        first, _ = self.queries(b)
        if self.x["cu_seqlens_q"] is not None:
            row = self.x["q"][first + i][h]
        else:
            row = self.x["q"][b][i][h]
        descale = self.x["q_descale"]
        return row if descale is None else [a * descale[b][h // self.group] for a in row]

    def values(self, name: str, b: int, j: int, g: int) -> list:
        """A key or a value, as the numbers that it stands for."""
        raw = self.stored(name, b, j)[g]
        if self.case.kv_dtype == "int4":
            nibbles = [n for byte in raw for n in (int(byte) & 15, int(byte) >> 4)]
            raw = [n - 16 if n > 7 else n for n in nibbles]
        descale, shift = self.x[f"{name}_descale"], self.x[f"{name}_shift"]
        if descale is None:
            return raw
        if not self.case.kv_group:
            return [a * descale[b][g] for a in raw]
        size = self.case.kv_group
        scales = self.stored(f"{name}_descale", b, j)[g]
        shifts = self.stored(f"{name}_shift", b, j)[g] if shift is not None else [0] * len(scales)
        return [a * scales[d // size] + shifts[d // size] for d, a in enumerate(raw)]

    # What attention is.

    def offset(self, b: int, len_q: int, len_k: int) -> int:
        if self.x["q_offsets"] is not None:
            return self.x["q_offsets"][b]
        return self.case.shift + (len_k - len_q if self.case.bottom_right else 0)

    def sees(self, b: int, h: int, i: int, j: int, len_q: int, len_k: int) -> bool:
        left, right, *first = self.case.window
        right = 0 if self.case.causal else right
        distance = j - i - self.offset(b, len_q, len_k)
        if right >= 0 and distance > right:
            return False
        if left >= 0 and -distance > left and j >= (first[0] if first else 0):
            return False
        if self.case.bias_dtype == "bool" and not self.x["bias"][b][h][i][j]:
            return False
        new = j - (len_k - len_q)
        if self.x["key_ranges"] is not None and not self._is_in_range(b, h, i, j):
            return False
        if self.x["block_rows"] is not None and not self._is_in_block(b, h, i, j):
            return False
        tree = self.x["tree_mask"]
        return tree is None or new < 0 or tree[b if len(tree) > 1 else 0][i][new]

    def _is_in_range(self, b: int, h: int, i: int, j: int) -> bool:
        ranges = self.x["key_ranges"]
        bounds = self.x["cu_seqlens_q"]
        row = ranges[b][h][i] if bounds is None else ranges[bounds[b] + i]
        first, *second = zip(row[::2], row[1::2], strict=True)
        return any(start <= j < stop for start, stop in (first, *second))

    def _is_in_block(self, b: int, h: int, i: int, j: int) -> bool:
        side = self.case.block_mask
        whole, part, *pairs = self.x["block_rows"][b][h][i // side]
        for place in range(whole + part):
            tile, index = pairs[2 * place : 2 * place + 2]
            if tile == j // side:
                word = self.x["block_bits"][index][i % side][j % side // 32]
                return index < 0 or bool(word % WORD >> j % 32 & 1)
        return False

    def score(self, b: int, h: int, i: int, j: int, len_q: int, len_k: int):
        key = self.values("k", b, j, h // self.group)
        s = sum(a * c for a, c in zip(self.query(b, i, h), key, strict=True)) * self.scale
        if self.case.softcap:
            s = self.case.softcap * cmath.tanh(s / self.case.softcap)
        if self.x["alibi_slopes"] is not None:
            far = abs(i + self.offset(b, len_q, len_k) - j)
            s -= self.x["alibi_slopes"][b][h] * far
        if self.x["rel_bias"] is not None:
            entries = self.x["rel_bias"][h]
            place = i + self.offset(b, len_q, len_k) - j + len(entries) // 2
            s += entries[min(max(place, 0), len(entries) - 1)]
        if self.x["bias"] is not None and self.case.bias_dtype != "bool":
            s += self.x["bias"][b][h][i][j]
        return s

    def row(self, b: int, h: int, i: int) -> tuple[list, complex | float, dict]:
        """(out, lse, sign-coded probability of each visible key) of one query of one head."""
        (_, len_q), len_k = self.queries(b), self.keys(b)
        seen = [j for j in range(len_k) if self.sees(b, h, i, j, len_q, len_k)]
        terms = {j: cmath.exp(self.score(b, h, i, j, len_q, len_k)) for j in seen}
        sink = self.x["sink"]
        total = sum(terms.values()) + (0 if sink is None else cmath.exp(sink[h]))
        out, probs = [0] * self.dim_v, {}
        if total == 0:
            return out, -math.inf, probs
        for j, term in terms.items():
            keep, p = True, self.case.dropout_p
            if p:
                keep = kept(self.case, self.x, b, h, i, j)
            probs[j] = term / total if keep else -term / total
            if keep:
                share = term / total / (1 - p)
                value = self.values("v", b, j, h // self.group)
                out = [a + share * c for a, c in zip(out, value, strict=True)]
        return out, cmath.log(total), probs
