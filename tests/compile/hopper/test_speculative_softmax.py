"""The scores that a warp computes a second time, their assembly run lane by lane in NumPy."""

import re

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon")

from heedful.kernels.hopper.sm90 import speculative_softmax

WARPS, LANES, ROWS, SLAB = 4, 32, 64, 64
THREADS = WARPS * LANES


def swizzled(matrix):
    """(rows, columns) as TMA leaves it: slabs of 64 columns, rows of 128 bytes in each, and in row
    r the 16-byte piece p at p ^ (r % 8)."""
    rows, columns = matrix.shape
    pieces = matrix.reshape(rows, columns // SLAB, 8, 8).transpose(1, 0, 2, 3)
    out = np.empty_like(pieces)
    for r in range(rows):
        out[:, r, np.arange(8) ^ (r % 8)] = pieces[:, r]
    return out.reshape(-1)


def load_matrices(memory, addresses):
    """ldmatrix.x4: lane l gives a row of matrix l / 8, and gets columns 2 (l % 4) and the next of
    row l / 4 of each."""
    out = np.empty((4, THREADS, 2))
    lane = np.arange(LANES)
    for warp in range(WARPS):
        of_warp = addresses[warp * LANES : (warp + 1) * LANES]
        assert (of_warp % 16 == 0).all()
        rows = memory[of_warp[:, None] // 2 + np.arange(8)]
        for i in range(4):
            for column in range(2):
                got = rows[8 * i + lane // 4, 2 * (lane % 4) + column]
                out[i, warp * LANES : (warp + 1) * LANES, column] = got
    return out


def multiply(a, b, c):
    """mma.m16n8k16: a in four registers of two, b in two of two, c in four; all by thread."""
    out = np.empty((4, THREADS))
    for warp in range(WARPS):
        threads = slice(warp * LANES, (warp + 1) * LANES)
        row, column = np.arange(LANES) // 4, 2 * (np.arange(LANES) % 4)
        left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for k in range(2):
            for i in range(4):
                left[row + 8 * (i % 2), column + 8 * (i // 2) + k] = a[i][threads, k]
            for i in range(2):
                right[column + 8 * i + k, row] = b[i][threads, k]
        for i in range(4):
            sums[row + 8 * (i // 2), column + i % 2] = c[i][threads]
        sums += left @ right
        for i in range(4):
            out[i, threads] = sums[row + 8 * (i // 2), column + i % 2]
    return out


BINARY = {
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "add.u32": np.add,
}


def execute(text, inputs, memory):
    """Runs assembly for one warpgroup; returns its registers by name."""
    registers = {**inputs, "%tid.x": np.arange(THREADS) + 256}
    lines, labels = [], {}
    for line in re.sub(r"^\{|\}\s*$", "", text).split(";"):
        line = line.strip()
        label = re.match(r"(\w+):\s*(.*)", line)
        if label:
            labels[label[1]] = len(lines)
            line = label[2]
        lines.append(line)

    def value(name):
        name = name.strip("{}[] ")
        if name in registers:
            return registers[name]
        return np.full(THREADS, int(name, 0) if "f0" not in name else 0)

    at, count = 0, 0
    while at < len(lines):
        line, at, count = lines[at], at + 1, count + 1
        assert count < 100_000
        if not line or line.startswith((".reg", ".pragma")):
            continue
        if line.startswith("@p bra"):
            at = labels[line.split()[-1]] if registers["p"].all() else at
            continue
        name, rest = line.split(None, 1)
        operands = [word.strip() for word in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+", rest)]
        operands = [word for word in operands if word]
        if name.startswith("ldmatrix"):
            base, _, offset = operands[1].strip("[]").partition("+")
            loaded = load_matrices(memory, value(base) + int(offset or 0))
            targets = operands[0].strip("{}").split(",")
            registers |= {t.strip(): loaded[i] for i, t in enumerate(targets)}
        elif name.startswith("mma"):
            d, a, b, c = ([r.strip() for r in word.strip("{}").split(",")] for word in operands)
            sums = multiply(*([registers[r] for r in group] for group in (a, b, c)))
            registers |= {register: sums[i] for i, register in enumerate(d)}
        elif name in ("mov.u32", "mov.f32"):
            registers[operands[0]] = value(operands[1]) + 0
        elif name == "mad.lo.u32":
            registers[operands[0]] = value(operands[1]) * value(operands[2]) + value(operands[3])
        elif name == "setp.lt.u32":
            registers[operands[0]] = value(operands[1]) < value(operands[2])
        else:
            registers[operands[0]] = BINARY[name](value(operands[1]), value(operands[2]))
    return registers


@pytest.mark.parametrize("dim, keys", [(64, 64), (128, 128), (256, 64)])
def test_the_second_scores_are_those_of_the_product_in_the_layout_of_its_accumulator(dim, keys):
    rng = np.random.default_rng(dim + keys)
    q, k = (rng.integers(-4, 5, (rows, dim)).astype(float) for rows in (ROWS, keys))
    memory = np.concatenate([np.full(512, np.nan), swizzled(q), swizzled(k)])
    q_at, k_at = 1024, 1024 + 2 * q.size
    outputs = keys // 2
    text = speculative_softmax._warp_scores(dim, keys, "bf16")
    inputs = {f"${outputs}": np.full(THREADS, q_at), f"${outputs + 1}": np.full(THREADS, k_at)}
    registers = execute(text, inputs, memory)
    thread = np.arange(THREADS)
    row = thread // LANES * 16 + thread % LANES // 4
    for i in range(outputs):
        column = i // 4 * 8 + 2 * (thread % 4) + i % 2
        expected = (q @ k.T)[row + 8 * (i // 2 % 2), column]
        assert (registers[f"${i}"] == expected).all(), i
