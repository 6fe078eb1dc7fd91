"""Conditions of kernels. Each is a function that returns the reason why a kernel does not take a
problem, or None. The conditions that a row of capability.py states by itself (architectures,
dtypes, features, head dims) are not here.
"""

from collections.abc import Callable
from typing import Any

from heedful.core.base.device import DeviceSpec
from heedful.core.call.problem import (
    ITEM_BITS,
    LATENT_ROWS,
    MAX_HEAD_DIM_V,
    NEAR_BYTES,
    AttentionProblem,
)
from heedful.core.registry.tiles import CONSUMER_ROWS, DECODE_ROWS, WIDE_DIM

Gate = Callable[[AttentionProblem, DeviceSpec], str | None]
# The oldest version of each tool.
Least = tuple[tuple[str, tuple[int, ...]], ...]

FLOATS = ("bfloat16", "float16", "float32")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


def parts_by_position(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """With numerics="invariant" keys are processed in the order of their positions, and parts of
    them end at fixed ones."""
    if not problem.invariant:
        return None
    beside = {
        "a block mask, whose lists have another order than positions": problem.block_mask,
        "dropout, which draws by the place in the batch": problem.dropout_p,
        f"num_splits {problem.num_splits}: parts end at fixed positions": problem.num_splits > 1,
    }
    words = "; ".join(name for name, is_there in beside.items() if is_there)
    return f"numerics='invariant' with {words}" if words else None


def one_run_of_keys(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """With numerics="invariant" the Hopper forward visits one run of key tiles, and scores are raw
    products: with a bias or ALiBi its tiles differ, or units do."""
    if not problem.invariant:
        return None
    beside = {
        "ALiBi": problem.alibi,
        "a bias": problem.bias or problem.rel_bias,
        "key ranges": problem.key_ranges,
        "leading keys": problem.mask.first,
    }
    words = ", ".join(name for name, is_there in beside.items() if is_there)
    return f"numerics='invariant' with {words}" if words else parts_by_position(problem, device)


def whole_results(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.return_probs and problem.num_splits > 1:
        return "returned probabilities of a split of the keys"
    if problem.max_scores and (problem.num_splits > 1 or problem.invariant):
        return "returned largest scores of parts of the keys"
    return None


def blocks_without_scores(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """The kernels of all scores visit every tile, and look for none in a list."""
    if problem.block_mask and problem.bias_grad:
        return "the gradient of a bias beside a block mask"
    if problem.block_mask and problem.rel_bias_grad:
        return "the gradient of a bias by relative position beside a block mask"
    if problem.block_mask and problem.return_probs:
        return "returned probabilities beside a block mask"
    return None


def one_diagonal_of_bias(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Gradients of a bias by relative position are summed along diagonals of all sequences."""
    if problem.rel_bias_grad and problem.q_offsets:
        return "the gradient of a bias by relative position beside a diagonal of each sequence"
    return None


def scales_of_groups(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.kv_shift and not problem.kv_group:
        return "shift of a cache without a scale per group"
    return None


def scales_of_heads(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Tiles of a quantised cache are converted with one scale, and are loaded by TMA, which wants
    strides of 16 bytes."""
    if not problem.quantized_kv:
        return None
    if problem.kv_group:
        return "a quantised cache with scales of groups: takes those of heads"
    for name, dim in (("head_dim", problem.head_dim), ("V's head_dim", problem.head_dim_v)):
        if dim % 16:
            return f"{name} {dim} of a quantised cache: takes multiples of 16"
    return None


def fp8_conversion(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    old = device.arch in ("sm_80", "sm_86") and problem.kv_dtype in (*FP8, LATENT_ROWS)
    foreign = device.vendor == "nvidia" and problem.kv_dtype == "float8_e4m3fnuz"
    if old or foreign:
        return f"{problem.kv_dtype} on {device.arch}, which cannot convert it"
    return None


def wide_float32(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    wide = max(problem.head_dim, problem.head_dim_v) > 256 and problem.dtype == "float32"
    if wide and device.shared_bytes < 128 * 1024 and device.vendor == "nvidia":
        return "float32 head dims over 256 need 128 KiB of shared memory"
    return None


def wider_keys_than_values(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """The columns of Q and K past MAX_HEAD_DIM_V are a separate product, which takes stored 16-bit
    keys alone."""
    if problem.head_dim <= MAX_HEAD_DIM_V:
        return None
    if ITEM_BITS[problem.dtype] != 16:
        return f"head_dim {problem.head_dim} of {problem.dtype}: takes up to {MAX_HEAD_DIM_V}"
    if problem.quantized_kv:
        return f"head_dim {problem.head_dim} of a quantised cache: takes up to {MAX_HEAD_DIM_V}"
    if problem.return_probs:
        return f"head_dim {problem.head_dim} with returned probabilities"
    return None


def some_tokens(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k)
    return "no tokens: a tensor map cannot be empty" if 0 in sizes else None


def positive_scale(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    return None if problem.scale > 0 else "softmax_scale <= 0"


def whole_pages(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.page_size % 16:
        return f"page_size {problem.page_size}: takes multiples of 16"
    if problem.page_size and problem.leftpad_k:
        return "left-padded pages"
    return None


def aligned_draws(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.dropout_p > 0 and (problem.dropout_origin[3] % 4 or problem.origins == 1):
        return "dropout from a column that is no multiple of 4"
    return None


def one_bias(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """The bias of a tile is held in registers: there is room for one."""
    if problem.bias and problem.rel_bias:
        return "a bias beside one by relative position"
    return None


def ranges_without_leading_keys(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Key tiles of ranges are one run, those of leading keys lie before it."""
    if problem.key_ranges and problem.mask.first:
        return "key ranges of rows with leading keys beside a window"
    return None


def lists_of_the_hopper_forward(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """A consumer has 64 rows. Steps of a list know their keys where they mask, and no earlier."""
    beside = {"leading keys": problem.mask.first, "ALiBi": problem.alibi}
    beside["a bias"] = problem.bias or problem.rel_bias
    return _lists_beside(problem, beside)


def lists_of_the_hopper_backward(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Key tiles of a list are added to dQ in any order."""
    return _lists_beside(problem, {"deterministic": problem.deterministic})


def used_queries_packed(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Rows of dense queries that are not in use may hold NaN, and would be read: a map that ends
    with each sequence needs strides of dO, which are not known yet."""
    if problem.used_q and not problem.varlen_q:
        return "lengths of queries that are not packed"
    return None


def _lists_beside(problem: AttentionProblem, others: dict[str, Any]) -> str | None:
    """Why a Hopper kernel does not take a block mask. others: what it does not take beside one."""
    if not problem.block_mask:
        return None
    if problem.block_mask < CONSUMER_ROWS:
        return f"a block mask of {problem.block_mask} rows a tile: takes 64 and 128"
    others = {"key ranges": problem.key_ranges, **others, "dropout": problem.dropout_p}
    words = ", ".join(name for name, is_there in others.items() if is_there)
    return f"a block mask beside {words}" if words else None


def equal_head_dims(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """All tiles of the Hopper backward of up to 128 columns have one width."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    return f"head dims {dim} and {dim_v}: takes equal ones" if dim != dim_v else None


def above_256(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Wide tiles have 512 columns."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    words = f"head dims {dim} and {dim_v}: takes those above 256"
    return None if min(dim, dim_v) > 256 else words


def above_128(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Wide tiles have 256 columns of Q and K, and 256 or 128 of V."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    words = f"head dims {dim} and {dim_v}: takes those above 128, of V above 64"
    return None if dim > 128 and dim_v > 64 else words


def values_to_128(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Gradients of 64 keys take 160 registers; wider ones leave none for dQ."""
    dim_v = problem.head_dim_v
    return f"V's head_dim {dim_v}: takes up to 128" if dim_v > 128 else None


def near_softcap(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """With a larger softcap scores may be far from 0, and the kernel that computes such rows again
    has another tanh."""
    if problem.softcap > 1024.0:
        return "gradients of a softcap above 1024"
    return None


def float_out(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    return None if problem.out_dtype in FLOATS else f"out of {problem.out_dtype}"


def own_e4m3(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    own = "float8_e4m3fnuz" if device.arch == "gfx942" else "float8_e4m3fn"
    foreign = ITEM_BITS[problem.dtype] == 8 and problem.dtype != own
    return f"{problem.dtype} on {device.arch}, which multiplies {own}" if foreign else None


def near_rows(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Buffer instructions reach 2^31 bytes from a tile's base, 256 rows of NEAR_BYTES; partial
    results of splits are dense rows of float32."""
    if problem.near_rows and 4 * problem.heads_q * problem.head_dim_v < NEAR_BYTES:
        return None
    return f"rows of Q, K, V or the output {NEAR_BYTES >> 20} MiB apart or more"


def many_keys(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    short = problem.seqlen_k < 384
    return f"seqlen_k {problem.seqlen_k}: takes 384 and more" if short else None


# The most rows of packed queries in the Hopper decode: four tiles.
PACKED_ROWS = 4 * DECODE_ROWS
# The limits of the decode kernel's wide heads: how many columns keys may have past their values,
# and how many row tiles, more than otherwise, since no other kernel reads such keys only once.
WIDE_REST, WIDE_TILES = 64, 32


def _more_rows_than(problem: AttentionProblem, most: int) -> str | None:
    rows = problem.seqlen_q * problem.group
    return f"{rows} query rows of a KV head: takes up to {most}" if rows > most else None


def rows_of_swapped_products(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """In this kernel query rows are columns of products, and one warpgroup's registers hold their
    output."""
    return _more_rows_than(problem, SWAP_AB_ROWS)


def rows_of_pairs(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Consumers that share the output's columns have tiles of 64 rows."""
    rows = problem.seqlen_q * problem.group
    if rows <= SWAP_AB_ROWS:
        return f"{rows} query rows of a KV head: takes more than {SWAP_AB_ROWS}"
    return None


def few_rows(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    most = DECODE_ROWS * (WIDE_TILES if problem.v_in_k and problem.head_dim > WIDE_DIM else 1)
    if problem.varlen_q and problem.quantized_kv:
        # Those beyond two tiles are left to the Hopper forward, where it takes them.
        most = PACKED_ROWS
    # Calls with 8-bit queries over caches may have any number of rows: no other kernel takes them.
    cached = problem.page_size or problem.used_k or problem.kv_batch_idx or problem.leftpad_k
    if cached and ITEM_BITS[problem.dtype] == 8:
        return None
    return _more_rows_than(problem, most)


def few_packed_rows(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Packed queries may have several tiles, each of which reads the keys."""
    return _more_rows_than(problem, PACKED_ROWS if problem.varlen_q else DECODE_ROWS)


def wide_heads(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """With head dims above 256 a row of keys is read only once: its first columns are values."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    if max(dim, dim_v) <= WIDE_DIM:
        return None
    if not problem.v_in_k:
        return f"head_dim {dim}: above {WIDE_DIM} takes a V that is a view of K"
    stored = ITEM_BITS[problem.kv_dtype]
    if stored != 16 and (stored != 8 or problem.kv_group or not problem.quantized_kv):
        words = "caches of 16 bits, or of 8 with scales of heads under queries of 16"
        return f"head_dim {dim}: above {WIDE_DIM} takes {words}"
    if dim_v not in (256, 512) or dim - dim_v > WIDE_REST:
        return f"head_dim {dim}: above {WIDE_DIM} takes {WIDE_REST} more than V's 256 or 512"
    return None


def bfloat16_beside_rows(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Rows of latent vectors have columns of bfloat16, which float16 may not hold."""
    if problem.kv_dtype == LATENT_ROWS and problem.dtype != "bfloat16":
        return f"{problem.dtype} queries over {LATENT_ROWS}: takes bfloat16"
    return None


# The head dims of the MLA decode: columns of V, and the most of K.
LATENT_DIM, LATENT_KEY_DIM = 512, 576
SWAP_AB_ROWS = 32


def values_in_keys(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """The columns past the values in a row of keys are one box of 64 columns."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    if not (dim_v == LATENT_DIM and LATENT_DIM < dim <= LATENT_KEY_DIM):
        words = f"{LATENT_DIM} and K of up to {LATENT_KEY_DIM - LATENT_DIM} columns more"
        return f"head dims {dim} and {dim_v}: takes V of {words}"
    if not problem.v_in_k:
        return "takes a V that is a view of K"
    return None


def sdpa_mask(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    mask = problem.mask
    if mask.causal and mask.shift:
        return "shifted causal mask"
    is_single = problem.used_k and problem.seqlen_q == 1
    unequal = problem.seqlen_q != problem.seqlen_k and not is_single
    if mask.causal and mask.bottom_right and unequal:
        return "causal mask of unequal lengths aligned bottom right (SDPA aligns top left)"
    return None


def sdpa_lengths(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if problem.used_q:
        return "lengths of queries"
    if not problem.used_k:
        return None
    if problem.seqlen_q != 1:
        return f"lengths of keys beside {problem.seqlen_q} queries: takes single queries"
    if problem.mask.causal and not problem.mask.bottom_right:
        return "lengths of keys under a causal mask aligned top left"
    return "lengths of keys and a later backward" if problem.needs_grad else None


def sdpa_log_sum_exp(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """SDPA returns no log-sum-exp. The operators that it calls do, for as many KV heads as query
    heads."""
    if not (problem.needs_grad or problem.return_lse) or problem.used_k:
        return None
    if problem.group > 1:
        return "log-sum-exp or gradients of fewer KV heads than query heads"
    sizes = problem.batch, problem.seqlen_q, problem.seqlen_k
    return "log-sum-exp or gradients without tokens" if 0 in sizes else None


def float_out_unpaged(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Values in pages are as wide as boxes of results, which float32 results do not have."""
    is_refused = problem.page_size and "float_out" in problem.features()
    return "float32 output over keys in pages" if is_refused else None


OF_THE_HOPPER_FORWARD = (lists_of_the_hopper_forward, one_run_of_keys, whole_results)
OF_THE_HOPPER_FORWARD += (float_out_unpaged,)


def least_of_biased_trees(problem: AttentionProblem, device: DeviceSpec) -> Least:
    """Triton 3.6 cannot translate a tree mask beside a bias for AMD GPUs; 3.7.1 can."""
    is_biased_tree = problem.bias and problem.tree_mask and device.vendor == "amd"
    return (("triton", (3, 7)),) if is_biased_tree else ()
