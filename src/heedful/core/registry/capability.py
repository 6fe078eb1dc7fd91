"""The one support matrix: which kernel takes which problem on which architecture, as data.

The planner, the tests and docs/support-matrix.md are all made from VARIANTS. Those of one backend
and direction are a row.
"""

from collections.abc import Callable, Set
from itertools import groupby
from typing import Any, NamedTuple

from heedful.core.base.device import DeviceSpec
from heedful.core.base.frozen import dataclass
from heedful.core.call.problem import (
    FEATURES,
    LATENT_ROWS,
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    AttentionProblem,
)
from heedful.core.registry import gates, mixed, preferences
from heedful.core.registry.gates import FLOATS, FP8, Gate, Least
from heedful.core.registry.preferences import Preferred
from heedful.core.registry.toolchain import JAX_ON_GPUS, Toolchain

LEVELS = {
    "run": "measured on that hardware",
    "emulated": "its machine code was executed on the CPU emulator",
    "compile-only": "compiles for that target; nobody has run it",
    "untested": "nothing is known to stand in its way",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel of a backend for one direction, and the problems that it takes. name: within its
    backend; "" if it is the only one. alias: its name when it was a backend, which still chooses
    it. levels: architecture -> support level; "nvidia:*" stands for NVIDIA parts not listed.
    features: what it takes beyond plain dense attention. unrun: those of them, and frameworks, with
    which it has not run on hardware, where it has without them: one that has takes such calls by
    default. kv_dtypes: of keys and values beside the dtype of the queries, and without that dtype
    if `converts`. max_dim, dim_multiple: the largest head dim of Q and K (V's is at most
    MAX_HEAD_DIM_V), and what head dims are multiples of.
    by_default: whether the planner may choose it where no backend is named. short_queries: the most
    queries of a sequence that a decode kernel handles, where the Hopper forward handles longer
    ones. gathers_pages: it takes keys in pages as dense copies, see torch/eager/pages.py. appends:
    it writes new keys and values into a cache itself, and rotates keys and queries; its
        program module has a `step`, see launch/program/programs.py.
    gates: further conditions, each a function that returns a reason or None. least_of: the oldest
    tools of some problems, beside `least`. preferences: the calls that it leaves to others by
    default, see preferences.py. configs: the kernels with tuned tiles that it launches, in the
    table of core/registry/configs.py. program: the module whose `forward` and `backward` make its
    Program; "" launches no kernels. module: the module whose `forward` and
    `backward` run on the host. framework: the one whose calls it takes, "" for any; a plan does not
    mention variants of other frameworks. varies: of a forward, what the bits of a row depend on
    that numerics="invariant" does not allow; "" if nothing.
    """

    backend: str
    direction: str
    name: str
    levels: dict[str, str]
    dtypes: tuple[str, ...]
    features: frozenset[str]
    kv_dtypes: tuple[str, ...] = ()
    converts: bool = False
    max_dim: int = MAX_HEAD_DIM_V
    dim_multiple: int = 1
    least: Least = ()
    by_default: bool = True
    short_queries: Callable[[AttentionProblem], int] | None = None
    gathers_pages: bool = False
    appends: bool = False
    gates: tuple[Gate, ...] = ()
    least_of: Callable[[AttentionProblem, DeviceSpec], Least] | None = None
    preferences: tuple[Callable[[AttentionProblem, DeviceSpec], Preferred | None], ...] = ()
    configs: tuple[str, ...] = ()
    program: str = ""
    module: str = ""
    framework: str = ""
    alias: str = ""
    unrun: frozenset[str] = frozenset()
    varies: str = ""

    @property
    def label(self) -> str:
        """The names of backend and variant."""
        return label(self.backend, self.name)

    @property
    def packed_as(self) -> str:
        """The name of its kernels in packs."""
        return self.alias or self.backend

    def tools_of(self, problem: AttentionProblem, device: DeviceSpec) -> Least:
        """The oldest tools that a problem needs."""
        return self.least + (self.least_of(problem, device) if self.least_of else ())

    def triton_of(
        self, toolchain: Toolchain, problem: AttentionProblem, device: DeviceSpec
    ) -> tuple[int, ...] | None:
        """The Triton that a problem's kernels are planned for: that of a loaded pack, which need
        not be the installed one, if it is new enough; else the installed one."""
        wanted = [least for tool, least in self.tools_of(problem, device) if tool == "triton"]
        tritons = toolchain.tritons_of(self.packed_as)
        return next((v for v in tritons if all(v >= least for least in wanted)), None)

    def unrun_with(self, problem: AttentionProblem, framework: str = "torch") -> frozenset[str]:
        """The entries of `unrun` that a call has."""
        return self.unrun & {*problem.features(), framework} if self.unrun else self.unrun

    def level(
        self, device: DeviceSpec, problem: AttentionProblem | None = None, framework: str = "torch"
    ) -> str | None:
        """The support level on this device, of this problem or without any of `unrun`. None where
        the kernel does not exist for the device."""
        level = self.levels.get(device.arch) or self.levels.get(f"{device.vendor}:*")
        is_unrun = problem is not None and self.unrun_with(problem, framework)
        return "compile-only" if level == "run" and is_unrun else level

    def why_not(
        self, problem: AttentionProblem, device: DeviceSpec, toolchain: Toolchain | None = None
    ) -> list[str]:
        """Every reason why this kernel cannot run the problem; empty if it can. If there is no
        kernel for the device, that is the only reason."""
        if self.level(device) is None:
            return [f"no kernel for {device.arch}"]
        reasons = []
        if problem.dtype not in self.dtypes:
            reasons.append(f"dtype {problem.dtype}: takes {', '.join(self.dtypes)}")
        if not self.stores(problem):
            reasons.append(f"KV of {problem.kv_dtype} beside {problem.dtype}")
        for name, dim in (("head_dim", problem.head_dim), ("V's head_dim", problem.head_dim_v)):
            if dim > self.max_dim:
                reasons.append(f"{name} {dim}: takes up to {self.max_dim}")
            if dim % self.dim_multiple:
                reasons.append(f"{name} {dim}: takes multiples of {self.dim_multiple}")
        lacking = problem.features() - self.features - _KINDS
        reasons += [f"does not take {FEATURES[name]}" for name in FEATURES if name in lacking]
        if problem.invariant and self.varies:
            reasons.append(f"numerics='invariant': {self.varies}")
        for gate in self.gates:
            reason = gate(problem, device)
            if reason:
                reasons.append(reason)
        toolchain = toolchain or Toolchain()
        if not self.serves(toolchain.framework):
            reasons.append(f"takes {self.framework} calls alone")
        reasons += self._lacking_tools(toolchain, device, problem)
        return reasons

    def stores(self, problem: AttentionProblem) -> bool:
        """Whether it takes keys and values as this problem stores them."""
        is_own = problem.kv_dtype == problem.dtype
        return not self.converts if is_own else problem.kv_dtype in self.kv_dtypes

    def serves(self, framework: str) -> bool:
        """Whether it takes calls of this framework."""
        return self.framework in ("", framework)

    def _lacking_tools(
        self, toolchain: Toolchain, device: DeviceSpec, problem: AttentionProblem
    ) -> list[str]:
        reasons, wanted_tools = [], self.tools_of(problem, device)
        if toolchain.framework == "jax" and device.vendor != "cpu":
            wanted_tools += (("jax", JAX_ON_GPUS),)
        for tool, least in wanted_tools:
            have = getattr(toolchain, tool)
            if tool == "triton":
                have = max(toolchain.tritons_of(self.packed_as), default=None)
            wanted = f"{tool} >= {'.'.join(map(str, least))}"
            if have is None:
                reasons.append(f"needs {wanted}, which is not installed")
            elif have < least:
                reasons.append(f"needs {wanted}, got {'.'.join(map(str, have))}")
        return reasons


# Features that a row states by its dtypes.
_KINDS = frozenset({"fp8", "quantized_kv"})

_EVERY_FEATURE = frozenset(FEATURES)
# Why a row's bits do not follow from its own keys and their positions alone.
_VARIES_BY_SHARES = "programs share the keys of a batch, whose lengths decide where parts end"
_VARIES_BY_TILES = "lengths and masks decide on tiles and their order, other rows on references"
_VARIES_BY_KERNEL = "lengths decide which of two kernels takes a sequence"
_VARIES_BY_SIZES = "sizes of the call decide how many keys are processed at once"
_QUANTIZED = ("int8", "int4", *FP8)
# Stored keys and values that the Hopper forward converts.
_E4M3 = ("float8_e4m3fn",)


def _on_cpus(
    backend: str, framework: str, least: tuple[int, ...], module: str
) -> tuple[Variant, ...]:
    """The variants of a framework's backend for CPUs, which takes every call."""
    common: dict[str, Any] = {"max_dim": MAX_HEAD_DIM, "least": ((framework, least),)}
    common |= {"module": module, "framework": framework}
    here, dtypes, stored = {"cpu": "run"}, (*FLOATS, *FP8), (*_QUANTIZED, LATENT_ROWS)
    varies = _VARIES_BY_SIZES
    return (
        Variant(
            backend, "forward", "", here, dtypes, _EVERY_FEATURE, stored, varies=varies, **common
        ),
        Variant(backend, "backward", "", here, FLOATS, _EVERY_FEATURE, **common),
    )


_OF_SDPA = frozenset({"causal", "diagonal", "unaligned", "return_lse", "backward", "deterministic"})
_SDPA: dict[str, Any] = {"least": (("torch", (2, 11)),), "framework": "torch"}
_SDPA |= {"module": "heedful.cpu.sdpa"}

_PORTABLE_LEVELS = {
    "sm_90": "run",
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"), "compile-only"),
    **dict.fromkeys(("gfx942", "gfx950"), "emulated"),
    **dict.fromkeys(("nvidia:*", "amd:*"), "untested"),
}

_OF_DECODE = frozenset(
    {"causal", "window", "first_keys", "diagonal", "sink", "softcap", "alibi"}
    | {"tree_mask", "varlen", "seqused", "paged", "kv_batch_idx", "leftpad_k", "gqa"}
    | {"head_dims_differ", "return_lse", "split_kv", "uneven_rows", "q_offsets"}
)
_OF_HOPPER = frozenset(
    {"causal", "window", "first_keys", "diagonal", "sink", "softcap", "alibi", "bias", "rel_bias"}
    | {"dropout", "origins", "varlen", "seqused", "paged", "kv_batch_idx", "leftpad_k", "gqa"}
    | {"head_dims_differ", "return_lse", "split_kv", "backward", "bias_grad", "rel_bias_grad"}
    | {"deterministic", "key_ranges", "block_mask", "max_scores", "q_offsets"}
)
_OF_HOPPER_DECODE = frozenset(
    {"causal", "window", "first_keys", "diagonal", "q_offsets", "sink", "varlen", "seqused"}
    | {"paged", "kv_batch_idx", "leftpad_k", "gqa", "head_dims_differ", "return_lse", "split_kv"}
)
_STEPS: dict[str, Any] = {"appends": True, "varies": _VARIES_BY_SHARES}
# The gates of kernels that load by TMA, and of those that also read caches.
_TMA_GATES = (gates.some_tokens, gates.positive_scale)
_CACHE_GATES = (*_TMA_GATES, gates.whole_pages)
_HOPPER_GATES = (
    *(*_CACHE_GATES, gates.aligned_draws),
    *(gates.ranges_without_leading_keys, gates.one_bias),
)


def _on_hopper(
    backend: str,
    name: str,
    features: Set[str],
    program: str,
    *configs: str,
    triton: tuple[int, ...] = (3, 9),
    **facts: Any,
) -> Variant:
    """A kernel for sm_90. facts: all else, in place of what holds for most: they take 16-bit
    queries. triton: by default the first with gl.inline_asm. program: within launch/bind."""
    usual: dict[str, Any] = {
        "direction": "forward",
        "dtypes": ("bfloat16", "float16"),
        "max_dim": 256,
        "dim_multiple": 8,
        "levels": {"sm_90": "run"},
    }
    return Variant(
        backend,
        name=name,
        features=frozenset(features),
        least=(("triton", triton),),
        configs=configs,
        program=f"heedful.launch.bind.{program}",
        **(usual | facts),
    )


def _mixed(
    name: str,
    features: frozenset[str],
    kernel: str,
    short_queries: Callable[[AttentionProblem], int],
    preference: Callable[[AttentionProblem, DeviceSpec], Preferred | None],
    **facts: Any,
) -> Variant:
    """The Hopper forward beside a decode kernel that handles the sequences of few queries."""
    return _on_hopper(
        "mixed",
        name,
        # Partial results of the Hopper forward are merged over all rows.
        (features & _OF_HOPPER) - {"split_kv"},
        "mixed",
        *("hopper.forward", kernel),
        short_queries=short_queries,
        varies=_VARIES_BY_KERNEL,
        gates=(*_HOPPER_GATES, gates.scales_of_heads, mixed.sequences_of_both_kinds),
        preferences=(preference,),
        **facts,
    )


def _latent(name: str, few_rows: Gate, *more: Gate, **facts: Any) -> Variant:
    """A kernel for latent vectors. few_rows: whether it is the one for few query rows."""
    return _on_hopper(
        "decode",
        name,
        {"causal", "diagonal", "seqused", "paged", "kv_batch_idx", "leftpad_k", "gqa"}
        | {"head_dims_differ", "return_lse", "split_kv", "q_offsets"},
        "mla",
        f"{name}.forward",
        max_dim=gates.LATENT_KEY_DIM,
        gates=(gates.values_in_keys, *_CACHE_GATES, few_rows, *more),
        alias=name,
        varies=_VARIES_BY_SHARES,
        **facts,
    )


# A backward holds the first two beside probabilities until dP is there: the derivative of the
# softcap, and which probabilities were dropped.
_TAKEN = {"softcap", "dropout", "origins", "block_mask", "key_ranges"}
# Runs of each sequence's keys, and packed queries in use.
_USED = frozenset({"seqused", "leftpad_k"})


def _hopper_backward(
    name: str, features: set[str], max_dim: int, *more: Gate, **facts: Any
) -> Variant:
    """A Hopper backward. features: what it takes beyond those of all. facts: as of `_on_hopper`."""
    kernel = "hopper.backward" if name == "backward" else f"hopper.backward_{name}"
    # Its inline assembly: sums of dQ are stored by cp.reduce.async.bulk.
    return _on_hopper(
        "hopper",
        name,
        {"causal", "window", "diagonal", "sink", "varlen", "gqa", "head_dims_differ"}
        | {"return_lse", "max_scores", "backward", "q_offsets", *_USED, *features},
        "hopper_backward",
        *(kernel, "portable.scores"),
        direction="backward",
        max_dim=max_dim,
        gates=(
            *(*_TMA_GATES, gates.aligned_draws, gates.near_softcap),
            *(gates.lists_of_the_hopper_backward, gates.used_queries_packed, *more),
        ),
        **facts,
    )


# Latent vectors of 8 bits.
_IF_STORED = (gates.scales_of_heads, gates.bfloat16_beside_rows)
_STORED: dict[str, Any] = {"kv_dtypes": (*_E4M3, LATENT_ROWS), "converts": True}

# The portable decode within a mixed batch: its features, its kernel, its sequences, its calls.
_SHORT = (_OF_DECODE, "decode.forward", mixed.queries_of_few_tiles, mixed.some_fill_few_tiles)

# In order of preference.
VARIANTS: tuple[Variant, ...] = (
    _latent("mla_swap_ab", gates.rows_of_swapped_products),
    _latent("mla", gates.few_rows),
    _latent(
        "mla_converting_pair",
        *(gates.few_rows, gates.rows_of_pairs, *_IF_STORED),
        **_STORED,
    ),
    _latent("mla_converting", gates.few_rows, *_IF_STORED, **_STORED),
    _on_hopper(
        *("decode", "hopper", _OF_HOPPER_DECODE, "hopper_decode", "hopper_decode.forward"),
        gates=(*_CACHE_GATES, gates.few_packed_rows),
        preferences=(
            preferences.many_rows,
            preferences.many_rows_of_one_length,
            preferences.packed_keys,
        ),
        alias="hopper_decode",
        **_STEPS,
    ),
    _on_hopper(
        *("decode", "wide", _OF_HOPPER_DECODE, "hopper_decode", "hopper_decode.wide_forward"),
        max_dim=512,
        gates=(*_CACHE_GATES, gates.above_256, gates.rows_of_swapped_products),
        unrun=frozenset(),
        **_STEPS,
    ),
    Variant(
        *("decode", "forward", "portable", _PORTABLE_LEVELS),
        *(("bfloat16", "float16", *FP8), _OF_DECODE | {"float_out"}),
        kv_dtypes=(*_QUANTIZED, LATENT_ROWS),
        max_dim=MAX_HEAD_DIM,
        dim_multiple=8,
        least=(("triton", (3, 6)),),
        appends=True,
        gates=(
            gates.few_rows,
            gates.wide_heads,
            gates.bfloat16_beside_rows,
            gates.float_out,
            gates.scales_of_groups,
            gates.fp8_conversion,
        ),
        preferences=(
            preferences.many_rows,
            preferences.many_rows_of_one_length,
            preferences.keys_of_one_length,
        ),
        configs=("decode.forward",),
        program="heedful.launch.bind.decode",
        varies=_VARIES_BY_SHARES,
    ),
    _mixed(
        "hopper",
        _OF_HOPPER_DECODE,
        "hopper_decode.forward",
        mixed.queries_of_a_tile,
        mixed.some_fill_a_tile,
        alias="hopper_mixed",
    ),
    _mixed("portable", *_SHORT, triton=(3, 6)),
    _mixed("converting", *_SHORT, kv_dtypes=_E4M3, converts=True),
    _on_hopper(
        *("hopper", "forward", _OF_HOPPER | {"float_out"}, "hopper", "hopper.forward"),
        triton=(3, 6),
        gates=(*_HOPPER_GATES, *gates.OF_THE_HOPPER_FORWARD),
    ),
    _on_hopper(
        "hopper",
        "forward_wide",
        {"causal", "window", "first_keys", "diagonal", "sink", "softcap", "varlen", "seqused"}
        | {"paged", "kv_batch_idx", "leftpad_k", "gqa", "head_dims_differ", "return_lse"}
        | {"split_kv", "backward", "q_offsets"},
        "hopper",
        "hopper.wide_forward",
        max_dim=512,
        gates=(*_CACHE_GATES, gates.above_256),
        varies=_VARIES_BY_TILES,
        framework="torch",
    ),
    _on_hopper(
        "hopper",
        "converting",
        # A bias and dropout need registers that these programs lack.
        (_OF_HOPPER & _OF_DECODE) | {"split_kv"},
        "hopper",
        "hopper.forward",
        kv_dtypes=_E4M3,
        converts=True,
        dim_multiple=16,
        gates=(*_HOPPER_GATES, gates.scales_of_heads),
        varies=_VARIES_BY_TILES,
    ),
    _on_hopper(
        "hopper",
        "fp8",
        {"causal", "window", "diagonal", "sink", "softcap", "varlen", "gqa"}
        | {"head_dims_differ", "return_lse", "q_offsets"},
        "hopper_fp8",
        "hopper.fp8_forward",
        dtypes=("float8_e4m3fn",),
        # 16 bytes: TMA requires strides that are multiples of these.
        dim_multiple=16,
        gates=(gates.some_tokens, gates.float_out),
        varies=_VARIES_BY_TILES,
    ),
    Variant(
        "cdna",
        "forward",
        "",
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
        gates=(
            gates.positive_scale,
            gates.float_out,
            gates.own_e4m3,
            gates.many_keys,
            gates.near_rows,
        ),
        configs=("cdna.forward",),
        program="heedful.launch.bind.cdna",
        varies=_VARIES_BY_TILES,
    ),
    Variant(
        *("portable", "forward", "", _PORTABLE_LEVELS, FLOATS, _EVERY_FEATURE),
        kv_dtypes=_QUANTIZED,
        max_dim=MAX_HEAD_DIM,
        least=(("triton", (3, 6)),),
        least_of=gates.least_of_biased_trees,
        gates=(
            gates.parts_by_position,
            gates.whole_results,
            gates.blocks_without_scores,
            gates.scales_of_groups,
            gates.fp8_conversion,
            gates.wider_keys_than_values,
        ),
        preferences=(preferences.in_every_layout,),
        configs=("portable.forward", "portable.scores"),
        program="heedful.launch.bind.portable",
    ),
    _hopper_backward("backward", {*_TAKEN, "deterministic"}, 128, gates.equal_head_dims),
    # Consumers add to dQ themselves, and take no turns. Words of a block mask have no room.
    _hopper_backward("pair", {"key_ranges"}, 192, gates.above_128, gates.values_to_128),
    _hopper_backward("wide", _TAKEN, 256, gates.above_128),
    _hopper_backward(
        *("halves", {"softcap"}, 512, gates.above_256), framework="torch", unrun=_USED
    ),
    Variant(
        "portable",
        "backward",
        "",
        _PORTABLE_LEVELS,
        FLOATS,
        # Only calls that record no gradient have cache rows by index.
        _EVERY_FEATURE - {"kv_batch_idx"},
        gathers_pages=True,
        least=(("triton", (3, 6)),),
        gates=(gates.wide_float32, gates.blocks_without_scores, gates.one_diagonal_of_bias),
        configs=("portable.backward_keys", "portable.backward_queries", "portable.scores"),
        program="heedful.launch.bind.portable",
    ),
    Variant(
        *("sdpa", "forward", "", {"cpu": "run"}, FLOATS),
        _OF_SDPA | {"gqa", "seqused", "uneven_rows"},
        gates=(gates.sdpa_mask, gates.sdpa_lengths, gates.sdpa_log_sum_exp),
        varies=_VARIES_BY_SIZES,
        **_SDPA,
    ),
    Variant(
        *("sdpa", "backward", "", {"cpu": "run"}, FLOATS),
        _OF_SDPA | {"gqa"},
        gates=(gates.sdpa_mask, gates.sdpa_log_sum_exp),
        **_SDPA,
    ),
    *_on_cpus("cpu", "torch", (2, 11), "heedful.cpu"),
    *_on_cpus("scan", "jax", (0, 10), "heedful.jax.tiled.scan"),
)


class KernelRow(NamedTuple):
    """A backend's kernels of one direction, the best first."""

    backend: str
    direction: str
    variants: tuple[Variant, ...]

    def taking(self, problem: AttentionProblem, also=()) -> tuple[Variant, ...]:
        """Those for queries of this dtype, and for its keys if they convert; all if there are
        none, so that each gives its reason. also: some that are asked for by name."""
        taken = [v for v in self.variants if v in also or problem.dtype in v.dtypes]
        taken = [v for v in taken if v in also or not v.converts or v.stores(problem)]
        return tuple(taken) or self.variants


# Names that chose one kernel before its backend was named.
ALIASES = {v.alias: (v.backend, v.name) for v in VARIANTS if v.alias}


def words_of(unrun: Set[str]) -> list[str]:
    """Entries of `Variant.unrun`, in words."""
    words = FEATURES | {"jax": "JAX's calls"}
    return [words[name] for name in words if name in unrun]


def label(backend: str, variant: str) -> str:
    """A kernel, or with "" a backend, in words."""
    return f"{backend}/{variant}" if variant else backend


def rows(direction: str) -> list[KernelRow]:
    """The backends of a direction, best first."""
    by_backend = groupby((v for v in VARIANTS if v.direction == direction), lambda v: v.backend)
    return [KernelRow(name, direction, tuple(of)) for name, of in by_backend]


def variant(backend: str, direction: str, name: str = "") -> Variant:
    """A kernel by its names. Raises LookupError if there is none."""
    by_name = {v.name: v for v in VARIANTS if (v.backend, v.direction) == (backend, direction)}
    if name in by_name:
        return by_name[name]
    if not by_name:
        raise LookupError(f"backend {backend!r} has no {direction} (of {', '.join(backends())})")
    names = ", ".join(map(repr, by_name))
    raise LookupError(f"{backend} has no {direction} {name!r}, only {names}")


def backends() -> tuple[str, ...]:
    """Every backend's name, best first."""
    return tuple(dict.fromkeys(v.backend for v in VARIANTS))
