"""The one support matrix: which kernel takes which problem on which architecture, as data.

The planner, the tests and docs/support-matrix.md are all made from ROWS.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heedful.core.device import DeviceSpec
from heedful.core.mixed import sequences_of_both_kinds, some_are_short
from heedful.core.preferences import (
    Preferred,
    keys_of_one_length,
    many_rows,
    many_rows_of_one_length,
    packed_keys,
)
from heedful.core.problem import (
    FEATURES,
    ITEM_BITS,
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    NEAR_BYTES,
    AttentionProblem,
)
from heedful.core.tiles import DECODE_ROWS, WIDE_DIM

LEVELS = {
    "run": "measured on that hardware",
    "emulated": "its machine code was executed on the CPU emulator",
    "compile-only": "compiles for that target; nobody has run it",
    "untested": "nothing is known to stand in its way",
}


# Whose call of compiled kernels takes machine code and tensor maps.
JAX_ON_GPUS = (0, 11, 1)
# Behind every version there is.
_NEWEST = (sys.maxsize,)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Versions at hand, as int tuples; None is absent. The default stands for the newest.

    packs: backends with kernels in a loaded pack, which need no Triton, and the one that they are
        planned for.
    validated: backends that passed `heedful validate` on this device, and may be chosen unasked.
    framework: whose arrays a call has, "torch" or "jax".
    """

    triton: tuple[int, ...] | None = _NEWEST
    torch: tuple[int, ...] | None = _NEWEST
    jax: tuple[int, ...] | None = _NEWEST
    packs: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    validated: frozenset[str] = frozenset()
    framework: str = "torch"

    def tritons_of(self, backend: str) -> list[tuple[int, ...]]:
        """Versions that a backend's kernels may be from, the oldest first: the installed one and
        the pack's. Kernels that differ are planned for the oldest, so that the pack is found and
        the installed one compiles what it lacks."""
        packed = dict(self.packs).get(backend)
        return sorted(version for version in (self.triton, packed) if version is not None)


Gate = Callable[[AttentionProblem, DeviceSpec], str | None]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What one backend's kernel of one direction takes.

    levels: architecture -> support level; "nvidia:*" stands for NVIDIA parts not listed.
    features: what it takes beyond plain dense attention.
    max_dim, dim_multiple: head dims of QK and V: at most (V MAX_HEAD_DIM_V), and a multiple of.
    by_default: whether the planner may choose it unasked.
    splits_batch: sequences of few queries run the decode kernel, and those of more the Hopper
        forward.
    gathers_pages: it takes keys in pages as dense copies, see torch/pages.py.
    appends: it writes new keys and values into a cache itself, and rotates keys and queries; its
        program module has a `step`, see launch/programs.py.
    gates: further conditions, each a function that returns a reason or None. unasked: what it
        leaves to others, see preferences.py.
    configs: the kernels with tuned tiles that it launches, in the table of core/configs.py.
    program: the module whose `forward` and `backward` make its Program; "" launches no kernels.
    module: the module whose `forward` and `backward` run on the host.
    framework: whose calls it takes, "" for any; the planner names no other's to a caller.
    """

    backend: str
    direction: str
    levels: dict[str, str]
    dtypes: tuple[str, ...]
    features: frozenset[str]
    kv_dtypes: tuple[str, ...] = ()
    max_dim: int = MAX_HEAD_DIM_V
    dim_multiple: int = 1
    least: tuple[tuple[str, tuple[int, ...]], ...] = ()
    by_default: bool = True
    splits_batch: bool = False
    gathers_pages: bool = False
    appends: bool = False
    gates: tuple[Gate, ...] = ()
    unasked: tuple[Callable[[AttentionProblem, DeviceSpec], Preferred | None], ...] = ()
    configs: tuple[str, ...] = ()
    program: str = ""
    module: str = ""
    framework: str = ""

    def level(self, device: DeviceSpec) -> str | None:
        """The support level on this device, None where the kernel does not exist for it."""
        return self.levels.get(device.arch) or self.levels.get(f"{device.vendor}:*")

    def why_not(
        self, problem: AttentionProblem, device: DeviceSpec, toolchain: Toolchain | None = None
    ) -> list[str]:
        """Every reason why this kernel cannot run the problem; empty if it can. Where it does not
        exist at all, that alone."""
        if self.level(device) is None:
            return [f"no kernel for {device.arch}"]
        reasons = []
        if problem.dtype not in self.dtypes:
            reasons.append(f"dtype {problem.dtype}: takes {', '.join(self.dtypes)}")
        if problem.kv_dtype not in (problem.dtype, *self.kv_dtypes):
            reasons.append(f"KV of {problem.kv_dtype} beside {problem.dtype}")
        for name, dim in (("head_dim", problem.head_dim), ("V's head_dim", problem.head_dim_v)):
            if dim > self.max_dim:
                reasons.append(f"{name} {dim}: takes up to {self.max_dim}")
            if dim % self.dim_multiple:
                reasons.append(f"{name} {dim}: takes multiples of {self.dim_multiple}")
        lacking = problem.features() - self.features - _KINDS
        reasons += [f"does not take {FEATURES[name]}" for name in FEATURES if name in lacking]
        for gate in self.gates:
            reason = gate(problem, device)
            if reason:
                reasons.append(reason)
        toolchain = toolchain or Toolchain()
        if not self.serves(toolchain.framework):
            reasons.append(f"takes {self.framework} calls alone")
        reasons += self._lacking_tools(toolchain, device)
        return reasons

    def serves(self, framework: str) -> bool:
        """Whether it takes calls of this framework."""
        return self.framework in ("", framework)

    def _lacking_tools(self, toolchain: Toolchain, device: DeviceSpec) -> list[str]:
        reasons, wanted_tools = [], self.least
        if toolchain.framework == "jax" and device.vendor != "cpu":
            wanted_tools += (("jax", JAX_ON_GPUS),)
        for tool, least in wanted_tools:
            have = getattr(toolchain, tool)
            if tool == "triton":
                have = max(toolchain.tritons_of(self.backend), default=None)
            wanted = f"{tool} >= {'.'.join(map(str, least))}"
            if have is None:
                reasons.append(f"needs {wanted}, which is not installed")
            elif have < least:
                reasons.append(f"needs {wanted}, got {'.'.join(map(str, have))}")
        return reasons


# Features that the dtypes of a row speak of.
_KINDS = frozenset({"fp8", "quantized_kv"})

_EVERY_FEATURE = frozenset(FEATURES)
_FLOATS = ("bfloat16", "float16", "float32")
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
_QUANTIZED = ("int8", "int4", *_FP8)


def _whole_probs(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.return_probs and problem.num_splits > 1:
        return "returned probabilities of a split of the keys"
    return None


def _scales_of_groups(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.kv_shift and not problem.kv_group:
        return "shift of a cache without a scale per group"
    return None


def _fp8_conversion(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    old = device.arch in ("sm_80", "sm_86") and problem.kv_dtype in _FP8
    foreign = device.vendor == "nvidia" and problem.kv_dtype == "float8_e4m3fnuz"
    if old or foreign:
        return f"{problem.kv_dtype} on {device.arch}, which cannot convert it"
    return None


def _wide_float32(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    wide = max(problem.head_dim, problem.head_dim_v) > 256 and problem.dtype == "float32"
    if wide and device.shared_bytes < 128 * 1024 and device.vendor == "nvidia":
        return "float32 head dims over 256 need 128 KiB of shared memory"
    return None


def wider_keys_than_values(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """What is past MAX_HEAD_DIM_V of Q and K is a product of its own, of 16-bit keys as stored."""
    if problem.head_dim <= MAX_HEAD_DIM_V:
        return None
    if ITEM_BITS[problem.dtype] != 16:
        return f"head_dim {problem.head_dim} of {problem.dtype}: takes up to {MAX_HEAD_DIM_V}"
    if problem.quantized_kv:
        return f"head_dim {problem.head_dim} of a quantised cache: takes up to {MAX_HEAD_DIM_V}"
    if problem.return_probs:
        return f"head_dim {problem.head_dim} with returned probabilities"
    return None


def _some_tokens(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k)
    return "no tokens: a tensor map cannot be empty" if 0 in sizes else None


def _positive_scale(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    return None if problem.scale > 0 else "softmax_scale <= 0"


def _whole_pages(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.page_size % 16:
        return f"page_size {problem.page_size}: takes multiples of 16"
    if problem.page_size and problem.leftpad_k:
        return "left-padded pages"
    return None


def _aligned_draws(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.dropout_p > 0 and problem.dropout_origin[3] % 4:
        return "dropout from a column that is no multiple of 4"
    return None


def _tiles_of_both_dims(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Tiles of one width up to 128 columns; wide ones are of 256, or of 256 and 128."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    if dim != dim_v and not (dim > 128 and dim_v > 64):
        return f"the backward of head dims {dim} and {dim_v}: takes equal ones, or above 128 and 64"
    return None


def _room_for_dropout(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """What a mask's exchange between threads takes, 3.5 KiB, is more than the tiles leave."""
    if problem.dropout_p > 0 and min(problem.head_dim, problem.head_dim_v) > 128:
        return "the backward of dropout with Q, K and V above 128"
    return None


def _any_order_if_wide(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Of wide heads consumers add to dQ themselves, and take no turns."""
    if problem.deterministic and max(problem.head_dim, problem.head_dim_v) > 128:
        return "a deterministic backward of head dims above 128"
    return None


def _out_as_in(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    return None if problem.out_dtype == problem.dtype else f"out of {problem.out_dtype}"


def _float_out(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    return None if problem.out_dtype in _FLOATS else f"out of {problem.out_dtype}"


def _own_e4m3(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    own = "float8_e4m3fnuz" if device.arch == "gfx942" else "float8_e4m3fn"
    foreign = ITEM_BITS[problem.dtype] == 8 and problem.dtype != own
    return f"{problem.dtype} on {device.arch}, which multiplies {own}" if foreign else None


def _out_as_in_or_float(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if ITEM_BITS[problem.dtype] == 8:
        return None if problem.out_dtype in _FLOATS else f"out of {problem.out_dtype}"
    return _out_as_in(problem, device)


def _near_rows(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Buffer instructions reach 2^31 bytes from a tile's base, 256 rows of NEAR_BYTES; partial
    results of splits are dense rows of float32."""
    if problem.near_rows and 4 * problem.heads_q * problem.head_dim_v < NEAR_BYTES:
        return None
    return f"rows of Q, K, V or the output {NEAR_BYTES >> 20} MiB apart or more"


def _many_keys(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    short = problem.seqlen_k < 384
    return f"seqlen_k {problem.seqlen_k}: takes 384 and more" if short else None


# Of the decode kernel's wide heads: how many columns keys may have past their values, and how many
# tiles of rows, since no other kernel reads keys once that are values too.
WIDE_REST, WIDE_TILES = 64, 32


def _more_rows_than(problem: AttentionProblem, most: int) -> str | None:
    rows = problem.seqlen_q * problem.group
    return f"{rows} query rows of a KV head: takes up to {most}" if rows > most else None


def _rows_of_swapped_products(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Query rows are columns of products there, and their output one warpgroup's registers."""
    return _more_rows_than(problem, SWAP_AB_ROWS)


def _few_rows(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    most = DECODE_ROWS * (WIDE_TILES if problem.v_in_k and problem.head_dim > WIDE_DIM else 1)
    # Of 8-bit queries over caches, which no other kernel takes, any number.
    cached = problem.page_size or problem.used_k or problem.kv_batch_idx or problem.leftpad_k
    if cached and ITEM_BITS[problem.dtype] == 8:
        return None
    return _more_rows_than(problem, most)


def _wide_heads(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Of head dims above 256 a row is read once: values lie in it."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    if max(dim, dim_v) <= WIDE_DIM:
        return None
    if not problem.v_in_k:
        return f"head_dim {dim}: above {WIDE_DIM} takes a V that is a view of K"
    if ITEM_BITS[problem.kv_dtype] != 16:
        return f"head_dim {dim}: above {WIDE_DIM} takes caches of 16 bits"
    if dim_v not in (256, 512) or dim - dim_v > WIDE_REST:
        return f"head_dim {dim}: above {WIDE_DIM} takes {WIDE_REST} more than V's 256 or 512"
    return None


# Of the MLA decode: columns of V, and the most of K.
LATENT_DIM, LATENT_KEY_DIM = 512, 576
SWAP_AB_ROWS = 32


def _values_in_keys(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """What is past the values in a row of keys, a box of 64 columns, is where probabilities go."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    if not (dim_v == LATENT_DIM and LATENT_DIM < dim <= LATENT_KEY_DIM):
        words = f"{LATENT_DIM} and K of up to {LATENT_KEY_DIM - LATENT_DIM} columns more"
        return f"head dims {dim} and {dim_v}: takes V of {words}"
    if not problem.v_in_k:
        return "takes a V that is a view of K"
    return None


def _sdpa_mask(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    mask = problem.mask
    if mask.causal and mask.shift:
        return "shifted causal mask"
    if mask.causal and mask.bottom_right and problem.seqlen_q != problem.seqlen_k:
        return "causal mask of unequal lengths aligned bottom right (SDPA aligns top left)"
    return None


def _on_cpus(
    backend: str, framework: str, least: tuple[int, ...], module: str
) -> tuple[KernelRow, ...]:
    """The rows of a framework's own backend for CPUs, which takes every call."""
    common: dict[str, Any] = {"max_dim": MAX_HEAD_DIM, "least": ((framework, least),)}
    common |= {"module": module, "framework": framework}
    here, dtypes = {"cpu": "run"}, (*_FLOATS, *_FP8)
    return (
        KernelRow(backend, "forward", here, dtypes, _EVERY_FEATURE, _QUANTIZED, **common),
        KernelRow(backend, "backward", here, _FLOATS, _EVERY_FEATURE, **common),
    )


_PORTABLE_LEVELS = {
    "sm_90": "run",
    "sm_80": "compile-only",
    "sm_86": "compile-only",
    "sm_89": "compile-only",
    "sm_100": "compile-only",
    "sm_120": "compile-only",
    "gfx942": "emulated",
    "gfx950": "emulated",
    "nvidia:*": "untested",
    "amd:*": "untested",
}

_OF_DECODE = frozenset(
    {"causal", "window", "first_keys", "diagonal", "sink", "softcap", "alibi"}
    | {"tree_mask", "varlen", "seqused", "paged", "kv_batch_idx", "leftpad_k", "gqa"}
    | {"head_dims_differ", "return_lse", "split_kv", "uneven_rows"}
)
_OF_HOPPER = frozenset(
    {"causal", "window", "first_keys", "diagonal", "sink", "softcap", "alibi", "bias"}
    | {"dropout", "varlen", "seqused", "paged", "kv_batch_idx", "leftpad_k", "gqa"}
    | {"head_dims_differ", "return_lse", "split_kv", "backward", "bias_grad"}
    | {"deterministic"}
)
_HOPPER_GATES = (_some_tokens, _positive_scale, _out_as_in, _whole_pages, _aligned_draws)


def _latent(backend: str, few_rows: Gate) -> KernelRow:
    """A kernel of latent vectors, of so few rows."""
    return KernelRow(
        backend,
        "forward",
        {"sm_90": "run"},
        ("bfloat16", "float16"),
        frozenset(
            {"causal", "diagonal", "seqused", "paged", "kv_batch_idx", "leftpad_k", "gqa"}
            | {"head_dims_differ", "return_lse", "split_kv"}
        ),
        max_dim=LATENT_KEY_DIM,
        dim_multiple=8,
        # For gl.inline_asm.
        least=(("triton", (3, 9)),),
        gates=(_values_in_keys, _some_tokens, _positive_scale, _out_as_in, _whole_pages, few_rows),
        configs=(f"{backend}.forward",),
        program=f"heedful.launch.bind.{backend}",
    )


# In order of preference.
ROWS: tuple[KernelRow, ...] = (
    _latent("mla_swap_ab", _rows_of_swapped_products),
    _latent("mla", _few_rows),
    KernelRow(
        "hopper_decode",
        "forward",
        {"sm_90": "run"},
        ("bfloat16", "float16"),
        frozenset(
            {"causal", "window", "first_keys", "diagonal", "sink", "varlen", "seqused", "paged"}
            | {"kv_batch_idx", "leftpad_k", "gqa", "head_dims_differ", "return_lse", "split_kv"}
        ),
        max_dim=256,
        dim_multiple=8,
        # For gl.inline_asm.
        least=(("triton", (3, 9)),),
        appends=True,
        gates=(_some_tokens, _positive_scale, _out_as_in, _whole_pages, _few_rows),
        unasked=(many_rows, many_rows_of_one_length, packed_keys),
        configs=("hopper_decode.forward",),
        program="heedful.launch.bind.hopper_decode",
    ),
    KernelRow(
        "decode",
        "forward",
        _PORTABLE_LEVELS,
        ("bfloat16", "float16", *_FP8),
        _OF_DECODE,
        kv_dtypes=_QUANTIZED,
        max_dim=MAX_HEAD_DIM,
        dim_multiple=8,
        least=(("triton", (3, 6)),),
        appends=True,
        gates=(_few_rows, _wide_heads, _float_out, _scales_of_groups, _fp8_conversion),
        unasked=(many_rows, many_rows_of_one_length, keys_of_one_length),
        configs=("decode.forward",),
        program="heedful.launch.bind.decode",
    ),
    KernelRow(
        "mixed",
        "forward",
        {"sm_90": "run"},
        ("bfloat16", "float16"),
        # Partial results of the Hopper forward are merged over all rows.
        (_OF_DECODE & _OF_HOPPER) - {"split_kv"},
        max_dim=256,
        dim_multiple=8,
        least=(("triton", (3, 6)),),
        splits_batch=True,
        gates=(*_HOPPER_GATES, sequences_of_both_kinds),
        unasked=(some_are_short,),
        configs=("hopper.forward", "decode.forward"),
        program="heedful.launch.bind.mixed",
    ),
    KernelRow(
        "hopper",
        "forward",
        {"sm_90": "run"},
        ("bfloat16", "float16"),
        _OF_HOPPER,
        max_dim=256,
        dim_multiple=8,
        least=(("triton", (3, 6)),),
        gates=_HOPPER_GATES,
        configs=("hopper.forward",),
        program="heedful.launch.bind.hopper",
    ),
    KernelRow(
        "hopper",
        "forward",
        {"sm_90": "run"},
        ("float8_e4m3fn",),
        frozenset(
            {"causal", "window", "diagonal", "sink", "softcap", "varlen", "gqa"}
            | {"head_dims_differ", "return_lse"}
        ),
        max_dim=256,
        # 16 bytes, which TMA wants strides to be multiples of.
        dim_multiple=16,
        # For gl.inline_asm.
        least=(("triton", (3, 9)),),
        gates=(_some_tokens, _float_out),
        configs=("hopper.fp8_forward",),
        program="heedful.launch.bind.hopper_fp8",
    ),
    KernelRow(
        "cdna",
        "forward",
        {"gfx942": "emulated", "gfx950": "emulated"},
        ("bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz"),
        frozenset(
            {"causal", "diagonal", "varlen", "gqa", "return_lse", "split_kv", "backward"}
            | {"deterministic"}
        ),
        # 64 and 128.
        max_dim=128,
        dim_multiple=64,
        least=(("triton", (3, 9)),),
        # Not before `heedful validate` has passed on the machine.
        by_default=False,
        gates=(_positive_scale, _out_as_in_or_float, _own_e4m3, _many_keys, _near_rows),
        configs=("cdna.forward",),
        program="heedful.launch.bind.cdna",
    ),
    KernelRow(
        "portable",
        "forward",
        _PORTABLE_LEVELS,
        _FLOATS,
        _EVERY_FEATURE,
        kv_dtypes=_QUANTIZED,
        max_dim=MAX_HEAD_DIM,
        least=(("triton", (3, 6)),),
        gates=(_whole_probs, _scales_of_groups, _fp8_conversion, wider_keys_than_values),
        configs=("portable.forward", "portable.scores"),
        program="heedful.launch.bind.portable",
    ),
    KernelRow(
        "hopper",
        "backward",
        {"sm_90": "run"},
        ("bfloat16", "float16"),
        frozenset(
            {"causal", "window", "diagonal", "softcap", "sink", "dropout", "varlen", "gqa"}
            | {"head_dims_differ", "return_lse", "backward", "deterministic"}
        ),
        max_dim=256,
        dim_multiple=8,
        # For gl.inline_asm: sums of dQ leave by cp.reduce.async.bulk.
        least=(("triton", (3, 9)),),
        gates=(_some_tokens, _positive_scale, _out_as_in, _aligned_draws)
        + (_tiles_of_both_dims, _any_order_if_wide, _room_for_dropout),
        configs=("hopper.backward", "portable.scores"),
        program="heedful.launch.bind.hopper_backward",
    ),
    KernelRow(
        "portable",
        "backward",
        _PORTABLE_LEVELS,
        _FLOATS,
        # Only calls that record no gradient pick cache rows by index.
        _EVERY_FEATURE - {"kv_batch_idx"},
        gathers_pages=True,
        least=(("triton", (3, 6)),),
        gates=(_wide_float32,),
        configs=("portable.backward_keys", "portable.backward_queries", "portable.scores"),
        program="heedful.launch.bind.portable",
    ),
    KernelRow(
        "sdpa",
        "forward",
        {"cpu": "run"},
        _FLOATS,
        # Without a log-sum-exp there is no backward.
        frozenset({"causal", "diagonal", "gqa", "unaligned"}),
        least=(("torch", (2, 11)),),
        gates=(_sdpa_mask,),
        module="heedful.cpu.sdpa",
        framework="torch",
    ),
    *_on_cpus("cpu", "torch", (2, 11), "heedful.cpu"),
    *_on_cpus("scan", "jax", (0, 10), "heedful.jax.tiled"),
)


def rows(direction: str) -> list[KernelRow]:
    """The kernels of a direction, best first."""
    return [row for row in ROWS if row.direction == direction]


def row(backend: str, direction: str, dtype: str) -> KernelRow:
    """The kernels of a backend for a direction and a dtype of queries."""
    return next(
        r for r in ROWS if (r.backend, r.direction) == (backend, direction) and dtype in r.dtypes
    )


def backends() -> tuple[str, ...]:
    """Every backend's name, best first."""
    return tuple(dict.fromkeys(row.backend for row in ROWS))
