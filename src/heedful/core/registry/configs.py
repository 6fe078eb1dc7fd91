"""Tuned tiles per kernel and architecture, each with where it was measured. The first row that
applies is taken, so special cases stand above general ones. Its config is then adapted to the
problem, so that a plan holds all that the code depends on.
"""

from collections.abc import Callable
from typing import Any

from heedful.core.base.device import DeviceSpec
from heedful.core.base.frozen import dataclass
from heedful.core.call.problem import ITEM_BITS, AttentionProblem
from heedful.core.registry import conditions as where
from heedful.core.registry import tiles


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """A config of `kernel` for these architectures ("*" = any), head dims up to `max_dim`, and
    problems that `when` accepts. measured: device, date and Triton version, or why it is a guess.
    least_units: the SMs that the device must have if programs wait for each other.
    """

    kernel: str
    archs: tuple[str, ...]
    max_dim: int
    config: tiles.TileConfig
    measured: str
    when: Callable[[AttentionProblem], bool]
    least_units: int = 0

    def fits(self, problem: AttentionProblem, device: DeviceSpec) -> bool:
        dim = max(problem.head_dim, problem.head_dim_v)
        return (
            dim <= self.max_dim
            and ("*" in self.archs or device.arch in self.archs)
            and self.least_units <= device.units
            and self.when(problem)
        )


_H200 = "H200, 2026-11-20, Triton 3.6: fastest without spills of those tried"
_H200_25 = "H200, 2026-11-25, Triton 3.9: fastest of those tried"
_H200_26 = "H200, 2026-11-26, Triton 3.9: fastest of those tried"
_H200_27 = "H200, 2026-11-27, Triton 3.9: fastest of those tried"
_H200_28 = "H200, 2026-11-28, Triton 3.9: fastest of those tried"
_H200_LISTS = "H200, 2026-11-27, Triton 3.9: the only one timed"
_NO_SPILLS = "sm_90, Triton 3.9: largest tried that compiles without spills; not timed"
_NO_SPILLS_EITHER = "sm_80 and sm_90, Triton 3.9: compiles without spills; not timed"
_H200_23 = "H200, 2026-11-23, Triton 3.9: fastest of those tried"
_FITS = "fits shared memory and registers when compiled; not timed"
_WIDER = "sm_80 and sm_90, Triton 3.9: compiles without spills in those tried; not timed"
_AMD = "compiled for gfx942 and gfx950: no spills, LDS within 64 KiB; not timed"
_NOT_TIMED = "one tile for every way of a call; not timed"
_SMALL = "small enough for 64 KiB of shared memory; not timed"
_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
_WARP_PRODUCTS = ("sm_80", "sm_86", "sm_89", "sm_120")  # with few rows all products are a warp's
_CDNA = ("gfx942", "gfx950", "gfx90a")

# The largest head dims of the tiles in a row below.
_DIMS = (64, 128, 256, 512)
# (rows, keys, warps, stages) of each kernel and head dim, by architectures, condition, and where
# they are from.
_PORTABLE = {
    (("*",), where.float32, _FITS): (
        ("forward", (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        ("backward_keys", (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        ("backward_queries", (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        ("scores", (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ),
    (("*",), where.high_pressure, _NO_SPILLS): (
        ("scores", (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ),
    (("*",), where.always, _NO_SPILLS): (
        ("scores", (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ),
    (("sm_90", *_WARP_PRODUCTS), where.high_pressure, _NO_SPILLS_EITHER): (
        ("forward", (32, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
        ("backward_keys", (16, 32, 4, 2), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        ("backward_queries", (32, 32, 8, 1), (16, 16, 8, 1), (32, 16, 4, 2), (16, 32, 8, 1)),
    ),
    (("sm_90",), where.some_pressure, _NO_SPILLS): (
        ("forward", (64, 64, 4, 3), (128, 32, 8, 3), (128, 16, 8, 3), (32, 16, 8, 1)),
        ("backward_keys", (32, 64, 4, 3), (32, 64, 8, 2), (32, 32, 8, 2), (16, 16, 8, 1)),
        ("backward_queries", (64, 64, 4, 3), (128, 32, 8, 3), (128, 16, 8, 2), (16, 32, 8, 1)),
    ),
    (("sm_90",), where.always, _H200): (
        ("forward", (64, 64, 4, 3), (128, 64, 8, 3), (128, 16, 8, 3), (32, 16, 8, 1)),
        ("backward_keys", (32, 64, 4, 3), (32, 128, 8, 4), (16, 32, 4, 2), (16, 16, 8, 1)),
        ("backward_queries", (64, 64, 4, 3), (128, 64, 8, 3), (128, 16, 8, 2), (16, 32, 8, 1)),
    ),
    (_CDNA, where.high_pressure, _AMD): (
        ("forward", (32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1)),
    ),
    (_CDNA, where.always, _AMD): (
        ("forward", (128, 64, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1), (32, 16, 4, 1)),
        ("backward_keys", (64, 64, 4, 1), (32, 64, 4, 1), (16, 64, 4, 1), (16, 32, 4, 1)),
        ("backward_queries", (128, 32, 4, 1), (128, 32, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1)),
    ),
    (_WARP_PRODUCTS, where.some_pressure, _NO_SPILLS_EITHER): (
        ("forward", (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1)),
    ),
    (_NVIDIA, where.always, _FITS): (
        ("forward", (64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1)),
        ("backward_keys", (64, 64, 4, 2), (32, 64, 8, 2), (32, 32, 8, 2), (16, 16, 8, 1)),
        ("backward_queries", (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 8, 1)),
    ),
    (("*",), where.always, _SMALL): (
        ("forward", (64, 32, 4, 1), (64, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        ("backward_keys", (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        ("backward_queries", (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ),
}
# The forward's for head dims up to 576, with its architectures, condition, and where they are from.
_PORTABLE_WIDE = (
    (("sm_90", *_NVIDIA), where.wider_keys_under_pressure, _WIDER, (16, 16, 8, 1)),
    (("sm_90", *_NVIDIA), where.wider_keys, _WIDER, (32, 16, 8, 1)),
    (_CDNA, where.wider_keys, _AMD, (32, 16, 4, 1)),
    (("*",), where.wider_keys, _SMALL, (16, 16, 4, 1)),
)

# The same with numerics="invariant": one tile for each head dim up to these, whatever the options.
_INVARIANT_DIMS = (64, 128, 256, 576)
_INVARIANT = (
    (("*",), where.invariant_float32, (32, 32, 8, 1), *[(16, 16, 8, 1)] * 3),
    (
        ("sm_80", "sm_90", "sm_100"),
        where.invariant,
        *((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2), (32, 16, 8, 1)),
    ),
    (("*",), where.invariant, *[(64, 32, 4, 1)] * 2, *[(16, 16, 4, 1)] * 2),
)

_H200_GLUON = "H200, 2026-11-20, Triton 3.9: fastest of those tried"
_LEAST_SPILLS = "sm_90, Triton 3.9: fewest spills of those compiled; others not timed"


# Rows, keys, warps, stages.
_Tile = tuple[int, int, int, int]


def _hopper(max_dim: int, tile: _Tile, when=where.always, measured=_H200_GLUON, **options):
    config = tiles.HopperForwardConfig(*tile, **options)
    return ConfigRow("hopper.forward", ("sm_90",), max_dim, config, measured, when)


def _hopper_wide(tile: _Tile, when=where.always, **options) -> ConfigRow:
    config = tiles.HopperWideConfig(*tile, **options)
    return ConfigRow("hopper.wide_forward", ("sm_90",), 512, config, _H200_27, when)


def _hopper_fp8(max_dim: int, tile: _Tile, when=where.always, **options):
    config = tiles.HopperFp8Config(*tile, **options)
    return ConfigRow("hopper.fp8_forward", ("sm_90",), max_dim, config, _H200_GLUON, when)


def _hopper_backward(
    dim: int, tile: _Tile, when=where.always, measured=_H200_23, kernel="hopper.backward", **options
):
    config = tiles.HopperBackwardConfig(*tile, **options)
    return ConfigRow(kernel, ("sm_90",), dim, config, measured, when)


# Speed over a program for each tile: 1.06 at 16 x 1024, 1.02 at 4 x 4096; with a larger last group
# of heads 1.13 at 1 x 8192, 32/8 causal; packed sequences 1.00 to 1.04, dropout 1.00 to 1.01.
_DRAWN: dict[str, Any] = {"draws": True, "last_waves": 2, "splits": 0}
# Heads innermost: 1.01 to 1.06 (causal); the others 1.01 to 1.05 (full; H200, 2026-11-28).
_D128_BACKWARD = {**_DRAWN, "heads_innermost": True, "tail_splits": 0, "rotates": True}
_DK_IN_KEYS = {**_D128_BACKWARD, "dk_in_keys": True}
_NO_DQ_GROUP = {"splits": 0, "k_stages": 1, "consumer_regs": 240, "dq_regs": None}
_HALVES = {**_NO_DQ_GROUP, "dout_stages": 1, "ds_stages": 1, "programs": 2}
_D64: dict[str, Any] = {
    "consumer_regs": 112,
    "producer_regs": 32,
    "rescale": "speculative",
    "v_stages": 6,
}
_D64_FOUR: dict[str, Any] = {**_D64, "q_stages": 8}
# Under ALiBi the threshold rescale runs, and pingpong keeps products and softmax apart.
_D64_PINGPONG: dict[str, Any] = {**_D64, "pingpong": True}
_D128: dict[str, Any] = {"consumer_regs": 240, "pingpong": True}
_D64_TWO: dict[str, Any] = {**_D128, "rescale": "speculative"}
_D128_SPECULATIVE: dict[str, Any] = {**_D128, "rescale": "speculative", "v_stages": 2}
_D128_UNEVEN: dict[str, Any] = {
    "consumer_regs": 160,
    "out_in_q": True,
    "producer_regs": 32,
    "q_stages": 4,
    "rescale": "speculative",
    "v_stages": 5,
}
_D192: dict[str, Any] = {**_D128, "out_in_q": True}
_D256: dict[str, Any] = {"consumer_regs": 240, "out_in_q": True}
_FP8_D64: dict[str, Any] = {
    "consumer_regs": 160,
    "producer_regs": 32,
    "q_stages": 6,
    "rescale": "speculative",
    "transposes_v": True,
    "votes_last": True,
}
_FP8_D128: dict[str, Any] = {
    "consumer_regs": 240,
    "sums_in_regs": True,
    "q_stages": 4,
    "rescale": "speculative",
    "transposes_v": True,
}
# In cycles 1.5 to 2.5 % fewer for masked calls, for those without a mask 3 % more (H200,
# 2026-11-22, Triton 3.9): measurements/hopper-fp8.md.
_FP8_D128_MASKED: dict[str, Any] = {**_FP8_D128, "votes_last": True, "prefetches_tile": True}


def _cdna(max_dim: int, tile: tuple[int, int, int, int], when=where.always) -> ConfigRow:
    measured = "compiled and emulated for gfx942 and gfx950: no spills; not timed"
    return ConfigRow(
        "cdna.forward", _GLUON_CDNA, max_dim, tiles.CdnaForwardConfig(*tile), measured, when
    )


_GLUON_CDNA = ("gfx942", "gfx950")


def _decode(
    archs: tuple[str, ...],
    max_dim: int,
    rows: int,
    tile: tuple[int, int, int],
    bits: int = 16,
    paged: bool | None = None,
    also: Callable[[AttentionProblem], bool] = where.always,
    **options,
) -> ConfigRow:
    """A config row for up to `rows` query rows of a KV head, caches of at most `bits` bits a value,
    in pages, not in pages or both (None), and problems that `also` accepts. tile: keys, warps,
    stages."""

    def when(problem: AttentionProblem) -> bool:
        fits = ITEM_BITS[problem.kv_dtype] <= bits and paged in (None, problem.page_size > 0)
        # Calls with more rows use the rows for 64, of which the planner takes the first that
        # applies.
        return fits and (rows == 64 or problem.seqlen_q * problem.group <= rows) and also(problem)

    measured = _FITS
    if "sm_90" in archs:
        later = _H200_25 if rows == 8 else _H200_23
        measured = later if rows <= 16 and max_dim in (128, 576) else _NO_SPILLS
        if rows == 64 and max_dim == 576:
            measured = _LEAST_SPILLS
        if bits == 8 and max_dim == 576:
            measured = _FITS
    elif archs == _CDNA:
        measured = _AMD
    # Timed in bfloat16 at D128, and assumed for the others: 1 x 1024 keys in eight segments take
    # 9.8 us, in four 10.8; 1 x 2048 in sixteen 11.3, in eight 11.1 (H200, 2026-11-26).
    fewest = 8 if archs == ("sm_90",) and max_dim <= 256 else 1
    config = tiles.DecodeConfig(rows, *tile, fewest_shares=fewest, **options)
    return ConfigRow("decode.forward", archs, max_dim, config, measured, when)


def _hopper_decode(
    max_dim: int,
    keys: int,
    stages: int,
    when: Callable[[AttentionProblem], bool] = where.always,
    **options,
) -> ConfigRow:
    config = tiles.HopperDecodeConfig(64, keys, 4, stages, fewest_shares=8, **options)
    return ConfigRow("hopper_decode.forward", ("sm_90",), max_dim, config, _H200_26, when)


def _hopper_decode_wide(
    rows: int, stages: int, when: Callable[[AttentionProblem], bool] = where.always
) -> ConfigRow:
    config = tiles.HopperDecodeConfig(
        *(rows, 64, 4, stages),
        **{"fewest_shares": 8, "programs": 1, "registers": 0, "producer_regs": 24},
    )
    return ConfigRow("hopper_decode.wide_forward", ("sm_90",), 512, config, _FITS, when)


def _mla(options: dict[str, Any], *when: Callable[[AttentionProblem], bool]) -> ConfigRow:
    """A config row for problems that all of `when` accept. Programs that wait for each other must
    run at once: the device needs an SM for each line of work tiles (core/planning/sizes.py)."""
    config = tiles.MlaConfig(64, 128, programs=1, **{"least_tiles": 2, **options})
    timed = _H200_26 if config.query_boxes else _H200_28 if config.merge else _H200_25
    measured = _LEAST_SPILLS if where.small_pages in when else timed
    units = where.MLA_SMS // where.MLA_PAIR_LEAST_SMS if config.merge else 0
    return ConfigRow("mla.forward", ("sm_90",), 576, config, measured, where.all_of(when), units)


def _mla_swap_ab(
    rows: int, options: dict[str, Any], *when: Callable[[AttentionProblem], bool]
) -> ConfigRow:
    """As `_mla`, for tiles of `rows` rows."""
    config = tiles.MlaSwapConfig(rows, 64, 4, 2, programs=1, **options)
    units = where.MLA_SMS // where.MLA_SWAP_LEAST_SMS if config.merge else 0
    kernel = "mla_swap_ab.forward"
    return ConfigRow(kernel, ("sm_90",), 576, config, _H200_26, where.all_of(when), units)


def _mla_converting(
    rows: int, options: dict[str, Any], *when: Callable[[AttentionProblem], bool]
) -> ConfigRow:
    """The same over latent vectors of 8 bits."""
    config = tiles.MlaConvertingConfig(rows, 64, 4, **{"programs": 2, **options})
    units = where.MLA_SMS // where.MLA_SWAP_LEAST_SMS if config.merge else 0
    kernel = "mla_converting.forward"
    measured = _H200_27 if config.merge or rows == 16 else _FITS
    return ConfigRow(kernel, ("sm_90",), 576, config, measured, where.all_of(when), units)


def _mla_converting_pair(
    sms: int, measured: str, *when: Callable[[AttentionProblem], bool], order: int = 0
) -> ConfigRow:
    """The same with 64 rows a tile. sms: of a tile, from which on all programs merge; 0: one merges
    them. order: 1 if parts are stored in the order of threads."""
    config = tiles.MlaConvertingPairConfig(
        *(64, 128, 4, 3), programs=1, least_tiles=2, merge=int(sms > 0), thread_order=order
    )
    units = where.MLA_SMS // sms if sms else 0
    kernel = "mla_converting_pair.forward"
    return ConfigRow(kernel, ("sm_90",), 576, config, measured, where.all_of(when), units)


# Keys and values that are converted. The producer's warps and those that convert have as many
# registers. 4 x 2048 queries over as many keys of e4m3, in pages, take 1.11 times as long as over
# bfloat16, 4 x 1024 over 8192 1.04, 512 over 32768 1.05; of head dim 64 1.17 (H200, 2026-11-27).
_CONVERTS: dict[str, Any] = {"out_in_q": True, "producer_regs": 56, "stored_stages": 2}
_TWO_CONVERT: dict[str, Any] = {**_CONVERTS, "consumer_regs": 224, "pingpong": True}
_WIDE_CONVERT: dict[str, Any] = {**_TWO_CONVERT, "stored_stages": 1}
_THREE_CONVERT: dict[str, Any] = {**_CONVERTS, "consumer_regs": 152, "rescale": "speculative"}
_NARROW_CONVERT: dict[str, Any] = {**_THREE_CONVERT, "stored_stages": 3}
_ONE: dict[str, Any] = {"pack_gqa": True}
_TWO: dict[str, Any] = {**_D128, "pack_gqa": True}
_THREE: dict[str, Any] = {"programs": 3, "registers": 168}
_FOUR: dict[str, Any] = {"conversion": 2, "programs": 4}
_MLA_PAGES: dict[str, Any] = {"consumer_regs": 232, "producer_regs": 40}
_MLA_TILES: dict[str, Any] = {"ahead": 1, "in_order": 1}
_MLA_MERGE: dict[str, Any] = {"merge": 1, "thread_order": 1}
_ALONE: dict[str, Any] = {"programs": 1, "registers": 0, "producer_regs": 56}

# With numerics="invariant" rows differ in what decides no bit: rows, stages and options of one tile
# of 64, of one of 128, and of all other calls, for a head dim and so many keys. Between two parts
# programs stop for 7 to 10 us at head dim 128, 40 to 65 at 256 (H100, 2026-11-27).
_PARTS: dict[str, Any] = {"part_keys": tiles.PART_KEYS}
_SPECULATIVE_PARTS: dict[str, Any] = {**_PARTS, "rescale": "speculative", "v_stages": 2}
_D64_PARTS = (128, 6, {**_D64_TWO, **_PARTS}), (256, 6, {**_D64_FOUR, **_PARTS})
_IN_PARTS = (
    (64, 64, (64, 8, {**_SPECULATIVE_PARTS, "v_stages": 8}), *_D64_PARTS),
    (128, 128, (64, 3, _SPECULATIVE_PARTS), *[(128, 3, {**_D128_SPECULATIVE, **_PARTS})] * 2),
    (256, 64, (64, 2, _PARTS), *[(128, 2, {**_D256, **_PARTS})] * 2),
)

ROWS: list[ConfigRow] = [
    *(
        _hopper(dim, (rows, keys, 4, stages), when, _NOT_TIMED, pack_gqa=packs, **more)
        for dim, keys, one, two, usual in _IN_PARTS
        for when, packs, (rows, stages, more) in (
            (where.invariant_packs_in_one, True, one),
            (where.invariant_packs, True, two),
            (where.invariant_few_rows, False, one),
            (where.invariant, False, usual),
        )
    ),
    _hopper(128, (128, 128, 4, 2), where.quantised_packs, _FITS, **_TWO_CONVERT, pack_gqa=True),
    _hopper(256, (128, 64, 4, 2), where.quantised_packs, _FITS, **_WIDE_CONVERT, pack_gqa=True),
    _hopper(128, (64, 128, 4, 2), where.quantised_few_rows, _FITS, **_CONVERTS),
    _hopper(64, (192, 64, 4, 5), where.quantised, _H200_27, **_NARROW_CONVERT),
    _hopper(128, (192, 64, 4, 4), where.quantised, _H200_27, **_THREE_CONVERT),
    _hopper(256, (128, 64, 4, 2), where.quantised, _FITS, **_WIDE_CONVERT),
    _hopper(64, (128, 128, 4, 4), where.lists_of_128, _H200_LISTS, **_D64_TWO),
    _hopper(128, (128, 128, 4, 3), where.lists_of_128, _H200_LISTS, **_D128_SPECULATIVE),
    _hopper(256, (128, 64, 4, 2), where.lists_of_128, _FITS, **_D256),
    _hopper(64, (64, 64, 4, 4), where.lists_of_64, _H200_LISTS, rescale="speculative"),
    _hopper(128, (64, 64, 4, 4), where.lists_of_64, _H200_LISTS, rescale="speculative"),
    _hopper(256, (64, 64, 4, 2), where.lists_of_64, _FITS),
    _hopper(128, (128, 64, 4, 3), where.any_pressure, _LEAST_SPILLS, **_D128),
    _hopper(256, (128, 32, 4, 2), where.any_pressure, _LEAST_SPILLS, **_D256),
    _hopper(64, (64, 128, 4, 4), where.packs_in_one, _LEAST_SPILLS, **_ONE),
    _hopper(128, (64, 128, 4, 2), where.packs_in_one, _LEAST_SPILLS, **_ONE),
    _hopper(256, (64, 64, 4, 2), where.packs_in_one, _LEAST_SPILLS, **_ONE),
    _hopper(64, (128, 128, 4, 4), where.packs, _LEAST_SPILLS, **_TWO),
    _hopper(128, (128, 128, 4, 2), where.packs, _LEAST_SPILLS, **_TWO),
    _hopper(256, (128, 64, 4, 2), where.packs, _LEAST_SPILLS, **_TWO, out_in_q=True),
    _hopper(64, (64, 128, 4, 4), where.few_rows, _H200_25, rescale="speculative"),
    _hopper(128, (64, 128, 4, 2), where.few_rows, _LEAST_SPILLS),
    _hopper(256, (64, 64, 4, 2), where.few_rows, _LEAST_SPILLS),
    _hopper(64, (64, 128, 4, 4), where.small_grid, _LEAST_SPILLS),
    _hopper(128, (64, 128, 4, 2), where.small_grid, _LEAST_SPILLS),
    _hopper(256, (64, 64, 4, 2), where.small_grid, _LEAST_SPILLS),
    _hopper(64, (128, 128, 4, 4), where.two_tiles_of_rows, _H200_25, **_D64_TWO),
    _hopper(64, (256, 64, 4, 6), where.slopes, **_D64_PINGPONG),
    # Keys and values share stages: windows and packed causal calls take 1.2 % fewer cycles, causal
    # ones as many, and those without a mask 2.5 % more (H200, 2026-11-22).
    _hopper(64, (256, 64, 4, 6), where.uneven_masks, **_D64_FOUR, kv_share_stages=True),
    _hopper(64, (256, 64, 4, 6), **_D64_FOUR),
    _hopper(128, (192, 64, 4, 5), where.uneven, **_D128_UNEVEN),
    _hopper(128, (128, 128, 4, 3), **_D128_SPECULATIVE),
    _hopper(192, (128, 128, 4, 2), where.narrow_values, **_D192),
    _hopper(192, (128, 64, 4, 3), where.no_pages, **_D192, v_stages=2),
    _hopper(256, (128, 64, 4, 2), **_D256),
    _hopper_wide((128, 64, 4, 5), consumer_regs=168),
    _hopper_fp8(64, (192, 128, 4, 4), **_FP8_D64),
    _hopper_fp8(128, (128, 128, 4, 4), where.masked, **_FP8_D128_MASKED),
    _hopper_fp8(128, (128, 128, 4, 4), **_FP8_D128),
    _hopper_fp8(256, (128, 64, 4, 2), consumer_regs=240),
    # In a fixed order a tile waits for those of lower numbers, which must have begun: so they are
    # drawn.
    _hopper_backward(64, (64, 128, 4, 2), where.lists_of_64, _FITS, **_DRAWN),
    _hopper_backward(64, (64, 128, 4, 2), where.holds_more_in_order, _FITS, draws=True),
    # Splits follow the batch and the SMs.
    _hopper_backward(64, (128, 128, 4, 2), where.invariant_in_order, _FITS, draws=True),
    _hopper_backward(128, (64, 128, 4, 2), where.invariant_in_order, _FITS, draws=True),
    _hopper_backward(64, (128, 128, 4, 2), where.in_order, _FITS, draws=True, splits=0),
    _hopper_backward(128, (64, 128, 4, 2), where.in_order, _FITS, draws=True, splits=0),
    _hopper_backward(64, (64, 128, 4, 3), where.holds_more, _FITS, dout_stages=3, **_DRAWN),
    _hopper_backward(64, (128, 128, 4, 2), **_DRAWN),
    _hopper_backward(128, (64, 128, 4, 2), where.short_walks, _H200_28, **_D128_BACKWARD),
    _hopper_backward(128, (64, 128, 4, 2), where.always, _H200_28, **_DK_IN_KEYS),
    _hopper_backward(
        192, (64, 128, 4, 2), where.always, _H200_25, "hopper.backward_pair", **_NO_DQ_GROUP
    ),
    _hopper_backward(256, (64, 64, 4, 2), kernel="hopper.backward_wide", **_NO_DQ_GROUP),
    _hopper_backward(512, (64, 64, 4, 2), where.always, _FITS, "hopper.backward_halves", **_HALVES),
    _cdna(64, (256, 128, 8, 1), where.eight_bit),
    _cdna(128, (256, 64, 8, 1)),
    # Page numbers are loaded two stages before keys, which takes two more stages. Tiles of 64 rows
    # use WGMMA, which reads keys from shared memory: fewer stages, so that an SM has room for two
    # programs. With few bits, instructions bound it and not bytes. Up to 8 rows are the columns of
    # products whose rows are keys: half as many products and exponentials. Over 64 x 8192 keys e4m3
    # with a scale a row takes 281 us instead of 290, int4 216 instead of 234, others as long (H200,
    # 2026-11-25). Programs of several heads read parts of one line at different times: with lines
    # prefetched as a whole, int4 takes 176 us instead of 215 (measured likewise). With 8 bits calls
    # take a third longer by this.
    _decode(
        ("sm_90",), 128, 8, (64, 2, 3), 4, False, where.heads_share_lines, fetch_ahead=3, **_FOUR
    ),
    *(
        _decode(("sm_90",), 128, 8, (64, 2, stages), 8, paged, where.scaled_by_row, **_FOUR)
        for stages, paged in ((5, True), (3, False))
    ),
    # With 4 bits, more warps with fewer registers each.
    *(
        _decode(("sm_90",), 128, 16, (128, 4, stages), 4, paged, conversion=2, **_THREE)
        for stages, paged in ((5, True), (3, False))
    ),
    *(
        _decode(("sm_90",), dim, rows, (keys, 4, stages), bits, paged, conversion=2)
        for dim, bits, keys in (
            (64, 8, 256),
            (64, 16, 128),
            (128, 8, 128),
            (128, 16, 64),
            (256, 8, 64),
            (256, 16, 32),
        )
        for rows, of_pages, of_rows in ((16, 5, 3), (32, 5, 3), (64, 3, 2))
        for paged, stages in ((True, of_pages), (False, of_rows))
    ),
    # Programs of a compute unit: as many as registers leave room for.
    *(_decode(_CDNA, 128, rows, (16, 4, 1), bits=8, programs=4) for rows in (16,)),
    *(
        _decode(_CDNA, dim, rows, (32, 4, 1), programs=programs)
        for dim in (128, 256)
        for rows, programs in ((16, 3), (32, 2), (64, 2))
    ),
    *(
        _decode(_NVIDIA, dim, rows, (keys, 4, 2))
        for dim, keys in ((128, 64), (256, 32))
        for rows in (16, 32, 64)
    ),
    *(
        _decode(("*",), dim, rows, (keys, 4, 1))
        for dim, keys in ((128, 64), (256, 32))
        for rows in (16, 32, 64)
    ),
    # An SM has two programs with one tile of keys and one of values each, 64 KB in flight in all.
    # 64 x 8192 keys take 475.7 us, with twice as many bytes in flight 484.6, with three times
    # 485.2; cuDNN takes 484.9. In pages, head dim 64 is faster with boxes of fewer rows: 253.8 us
    # instead of 257.6. At head dim 256 one program has two tiles of each: 64 x 4096 take 478.1
    # instead of 481.8, in pages 488.5 instead of 506.9 (H200, 2026-11-26).
    _hopper_decode(64, 64, 2, where.in_pages),
    _hopper_decode(64, 128, 1),
    # If boxes have fewer keys than a tile, two tiles of each are faster: 64 x 8192 in pages of 16
    # take 489.3 us instead of 493.8, 128 sequences of different lengths 891.6 instead of 900.1; in
    # pages of 64 490.1 instead of 488.1 (H200, 2026-11-26).
    _hopper_decode(128, 64, 2, where.small_pages),
    _hopper_decode(128, 64, 1),
    _hopper_decode(256, 64, 2, programs=1, registers=0),
    # A third tile fits beside queries of 16 rows.
    _hopper_decode_wide(16, 3, where.sixteen_rows),
    _hopper_decode_wide(32, 2),
    # Keys of 512 + 64 columns, the first 512 of which are values.
    *(
        _decode(
            ("sm_90",), 576, rows, (32, 8, 3), 8, also=where.rows_of_bytes, programs=1, conversion=2
        )
        for rows in (16, 32)
    ),
    *(
        _decode(
            ("sm_90",),
            576,
            rows,
            (32, warps, 2 * stages - 1 if paged else stages),
            bits,
            paged,
            merge_values=merge_values,
            conversion=0 if bits == 16 else 2,
        )
        for bits in (8, 16)
        for rows, warps, stages, merge_values in ((16, 4, 3, 128), (32, 4, 3, 32), (64, 8, 2, 32))
        for paged in (True, False)
    ),
    *(
        _decode(archs, 576, rows, (16, warps if rows == 64 else 4, stages), programs=1)
        for archs, warps, stages in ((_CDNA, 4, 1), (_NVIDIA, 8, 2), (("*",), 8, 1))
        for rows in (16, 32, 64)
    ),
    # Two blocks of keys. With part of a third, 16 heads over 64 x 8192 keys take 152.4 us instead
    # of 148.6 (H200, 2026-11-26).
    *(
        _mla_swap_ab(rows, options, of_rows, when)
        for rows, of_rows in ((16, where.sixteen_rows), (32, where.always))
        for when, options in (
            (where.all_merge_sooner, {"merge": 1, "least_tiles": 2}),
            (where.always, {"least_tiles": 4}),
        )
    ),
    *(
        _mla_converting(rows, {**options, **facts}, of_rows, of_keys, when)
        for rows, of_rows, of_keys, facts in (
            (16, where.sixteen_rows, where.always, {"num_stages": 2}),
            # Probabilities of each group of columns take room.
            (32, where.always, where.rows_of_bytes, {"num_stages": 3, **_ALONE}),
            (32, where.always, where.always, {"num_stages": 2}),
        )
        for when, options in (
            (where.all_merge_sooner_in_lines, {"merge": 1, "least_tiles": 2}),
            (where.always, {"least_tiles": 4}),
        )
    ),
    _mla_converting_pair(
        where.MLA_LEAST_SMS, _H200_27, where.rows_of_bytes, where.merge_outlasts_waiting
    ),
    _mla_converting_pair(0, _H200_27, where.rows_of_bytes),
    _mla_converting_pair(where.MLA_PAIR_LEAST_SMS, _H200_28, where.pairs_merge_sooner, order=1),
    _mla_converting_pair(0, _FITS),
    # If pages hold fewer keys than a block, the producer holds more page numbers. 128 heads over 64
    # x 8192 keys take 226.8 us with `ahead` and `in_order`, and 231 without (2026-11-25). With two
    # boxes of queries in registers they take 224.3 us instead of 230.3, but 64 x 1024 54.9 instead
    # of 53.8 (H200, 2026-11-26).
    *(
        _mla(options, *when)
        for when, options in (
            (
                (where.small_pages, where.tiles_merge_sooner, where.short_caches),
                {**_MLA_PAGES, **_MLA_MERGE, "least_tiles": 1},
            ),
            ((where.small_pages, where.tiles_merge_sooner), {**_MLA_PAGES, **_MLA_MERGE}),
            ((where.small_pages, where.several_tiles_of_rows), {**_MLA_PAGES, **_MLA_TILES}),
            ((where.small_pages,), _MLA_PAGES),
            ((where.tiles_merge_sooner, where.short_caches), {**_MLA_MERGE, "least_tiles": 1}),
            ((where.tiles_merge_sooner,), _MLA_MERGE),
            ((where.several_tiles_of_rows, where.long_caches), {**_MLA_TILES, "query_boxes": 2}),
            ((where.several_tiles_of_rows,), _MLA_TILES),
            ((), {}),
        )
    ),
    *(
        ConfigRow(
            "portable.forward",
            archs,
            max_dim,
            tiles.PortablePartsConfig(*tile, part_keys=tiles.PART_KEYS),
            _NOT_TIMED,
            when,
        )
        for archs, when, *by_dim in _INVARIANT
        for max_dim, tile in zip(_INVARIANT_DIMS, by_dim, strict=True)
    ),
    *(
        ConfigRow("portable.forward", archs, 576, tiles.PortableConfig(*tile), measured, when)
        for archs, when, measured, tile in _PORTABLE_WIDE
    ),
    *(
        ConfigRow(f"portable.{kernel}", archs, max_dim, tiles.PortableConfig(*tile), measured, when)
        for (archs, when, measured), rows in _PORTABLE.items()
        for kernel, *by_dim in rows
        for max_dim, tile in zip(_DIMS, by_dim, strict=True)
    ),
]


def choose(kernel: str, problem: AttentionProblem, device: DeviceSpec) -> ConfigRow:
    """The config row of `kernel` for this problem on this device."""
    for row in ROWS:
        if row.kernel == kernel and row.fits(problem, device):
            return row
    raise LookupError(f"no config of {kernel} fits {problem.key()} on {device.name}")
