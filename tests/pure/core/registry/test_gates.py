"""Gates hold up to their borders, each fact of one counts alone, and a reason names that fact."""

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import LATENT_ROWS, NEAR_BYTES, AttentionProblem
from heedful.core.registry import gates as g
from heedful.core.registry.capability import VARIANTS

FIRST = {"mask": MaskSpec.of(True, (100, 0, 4))}
INVARIANT = {"invariant": True}
LISTS = {"block_mask": 128}
FP8 = {"dtype": "float8_e4m3fn"}
E4M3 = {"kv_dtype": "float8_e4m3fn"}
FLOAT32 = {"dtype": "float32"}
LATENT = {"heads_k": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True}
TOP_LEFT = {"mask": MaskSpec.of(True, bottom_right=False)}
BIASED_TREE = {"bias": True, "tree_mask": True}
# Of 4 query heads of a KV head: the rows of one tile of a decode, and of the most tiles.
ONE_TILE, FOUR_TILES, ALL_TILES = 16, 64, 512

# By gate: facts of calls that it takes; and of others, with words of the reason.
BORDERS: dict = {
    g.parts_by_position: (
        [LISTS, {**INVARIANT, "num_splits": 1}],
        [
            ({**INVARIANT, **LISTS}, "with a block mask, whose lists have another order"),
            ({**INVARIANT, "dropout_p": 0.1}, "with dropout, which draws by the place"),
            ({**INVARIANT, "num_splits": 2}, "with num_splits 2: parts end at fixed"),
        ],
    ),
    g.one_run_of_keys: (
        [{"alibi": True}, INVARIANT],
        [
            ({**INVARIANT, "alibi": True}, "with ALiBi"),
            ({**INVARIANT, "bias": True}, "with a bias"),
            ({**INVARIANT, "rel_bias": True}, "with a bias"),
            ({**INVARIANT, "key_ranges": 1}, "with key ranges"),
            ({**INVARIANT, **FIRST}, "with leading keys"),
            ({**INVARIANT, "alibi": True, **FIRST}, "with ALiBi, leading keys"),
            ({**INVARIANT, "num_splits": 2}, "with num_splits 2"),
        ],
    ),
    g.whole_results: (
        [{"return_probs": True, "num_splits": 1}, {"max_scores": True, "num_splits": 1}]
        + [{"num_splits": 2}, INVARIANT],
        [
            ({"return_probs": True, "num_splits": 2}, "returned probabilities of a split"),
            ({"max_scores": True, "num_splits": 2}, "returned largest scores of parts"),
            ({"max_scores": True, **INVARIANT}, "returned largest scores of parts"),
        ],
    ),
    g.blocks_without_scores: (
        [LISTS, {"bias_grad": True}, {"rel_bias_grad": True}, {"return_probs": True}],
        [
            ({**LISTS, "bias_grad": True}, "gradient of a bias beside a block mask"),
            ({**LISTS, "rel_bias_grad": True}, "a bias by relative position beside a block mask"),
            ({**LISTS, "return_probs": True}, "returned probabilities beside a block mask"),
        ],
    ),
    g.wide_float32: (
        [{**FLOAT32, "head_dim": 256}, {"head_dim": 257}],
        [
            ({**FLOAT32, "head_dim": 257, "head_dim_v": 1}, "over 256 need 128 KiB"),
            ({**FLOAT32, "head_dim": 1, "head_dim_v": 257}, "over 256 need 128 KiB"),
        ],
    ),
    g.wider_keys_than_values: (
        [{"head_dim": 512, **FLOAT32}, {"head_dim": 512, **E4M3}, {"head_dim": 513}]
        + [{"head_dim": 512, "return_probs": True}],
        [
            ({"head_dim": 513, **FLOAT32}, "head_dim 513 of float32: takes up to 512"),
            ({"head_dim": 513, **FP8}, "head_dim 513 of float8_e4m3fn: takes up to 512"),
            ({"head_dim": 513, **E4M3}, "head_dim 513 of a quantised cache: takes up to 512"),
            ({"head_dim": 513, "return_probs": True}, "head_dim 513 with returned probabilities"),
        ],
    ),
    g.some_tokens: (
        [{}, {"total_q": 1, "total_k": 1}],
        [
            ({name: 0}, "no tokens")
            for name in ("batch", "seqlen_q", "seqlen_k", "total_q", "total_k")
        ],
    ),
    g.positive_scale: ([{"scale": 0.5}], [({"scale": -0.5}, "softmax_scale <= 0")]),
    g.whole_pages: (
        [{"page_size": 16}, {"leftpad_k": True}],
        [
            ({"page_size": 24}, "page_size 24: takes multiples of 16"),
            ({"page_size": 16, "leftpad_k": True}, "left-padded pages"),
        ],
    ),
    g.aligned_draws: (
        [
            {"dropout_p": 0.1, "dropout_origin": (1, 1, 1, 4), "origins": 4},
            {"dropout_origin": (0, 0, 0, 1)},
            {"origins": 1},
        ],
        [
            ({"dropout_p": 0.1, "dropout_origin": (0, 0, 0, 1)}, "no multiple of 4"),
            ({"dropout_p": 0.1, "origins": 1}, "no multiple of 4"),
        ],
    ),
    g.ranges_without_leading_keys: (
        [FIRST, {"key_ranges": 1}],
        [({**FIRST, "key_ranges": 1}, "key ranges of rows with leading keys")],
    ),
    g.lists_of_the_hopper_forward: (
        [LISTS, {"block_mask": 64}, {"alibi": True}, {**LISTS, "deterministic": True}],
        [
            ({"block_mask": 32}, "a block mask of 32 rows a tile: takes 64 and 128"),
            ({**LISTS, **FIRST}, "a block mask beside leading keys"),
            ({**LISTS, "alibi": True}, "a block mask beside ALiBi"),
            ({**LISTS, "bias": True}, "a block mask beside a bias"),
            ({**LISTS, "rel_bias": True}, "a block mask beside a bias"),
            ({**LISTS, "key_ranges": 1}, "a block mask beside key ranges"),
            ({**LISTS, "dropout_p": 0.1}, "a block mask beside dropout."),
            ({**LISTS, "alibi": True, "dropout_p": 0.1}, "a block mask beside ALiBi, dropout"),
        ],
    ),
    g.lists_of_the_hopper_backward: (
        [LISTS, {"deterministic": True}, {**LISTS, "alibi": True}],
        [
            ({"block_mask": 32}, "a block mask of 32 rows a tile: takes 64 and 128"),
            ({**LISTS, "deterministic": True}, "a block mask beside deterministic."),
            ({**LISTS, "dropout_p": 0.1}, "a block mask beside dropout."),
        ],
    ),
    g.above_256: (
        [{"head_dim": 257}],
        [
            ({"head_dim": 256, "head_dim_v": 257}, "256 and 257: takes those above 256"),
            ({"head_dim": 257, "head_dim_v": 256}, "257 and 256: takes those above 256"),
        ],
    ),
    g.above_128: (
        [{"head_dim": 129, "head_dim_v": 65}],
        [
            ({"head_dim": 128, "head_dim_v": 65}, "128 and 65: takes those above 128"),
            ({"head_dim": 129, "head_dim_v": 64}, "129 and 64: takes those above 128"),
        ],
    ),
    g.values_to_128: (
        [{"head_dim": 256, "head_dim_v": 128}],
        [({"head_dim_v": 129}, "V's head_dim 129: takes up to 128")],
    ),
    g.near_softcap: (
        [{"softcap": 1024.0}],
        [({"softcap": 1025.0}, "gradients of a softcap above 1024")],
    ),
    g.near_rows: (
        [{"heads_q": NEAR_BYTES // 512 - 4}, {"heads_q": NEAR_BYTES // 512, "head_dim_v": 64}],
        [
            ({"near_rows": False}, "8 MiB apart or more"),
            ({"heads_q": NEAR_BYTES // 512}, "8 MiB apart or more"),
            ({"heads_q": NEAR_BYTES // 512, "head_dim": 64, "head_dim_v": 128}, "8 MiB apart"),
        ],
    ),
    g.many_keys: ([{"seqlen_k": 384}], [({"seqlen_k": 383}, "seqlen_k 383: takes 384 and more")]),
    g.rows_of_swapped_products: (
        [{"seqlen_q": 8}],
        [({"seqlen_q": 33, "heads_q": 1}, "33 query rows")],
    ),
    g.rows_of_pairs: (
        [{"seqlen_q": 9}, {"seqlen_q": 33, "heads_q": 1}],
        [
            ({"seqlen_q": 8}, "32 query rows of a KV head: takes more than 32"),
            ({"seqlen_q": 4}, "16 query rows of a KV head: takes more than 32"),
        ],
    ),
    g.few_rows: (
        [
            {"seqlen_q": ONE_TILE},
            {"seqlen_q": ALL_TILES, "head_dim": 257, "head_dim_v": 256, "v_in_k": True},
            {"seqlen_q": FOUR_TILES, "total_q": 999, **E4M3},
            *(
                {"seqlen_q": 999, **FP8, **cached}
                for cached in (
                    {"page_size": 16},
                    {"used_k": True},
                    {"kv_batch_idx": True},
                    {"leftpad_k": True},
                )
            ),
        ],
        [
            ({"seqlen_q": ONE_TILE + 1}, "68 query rows of a KV head: takes up to 64"),
            ({"seqlen_q": ONE_TILE + 1, "head_dim": 256, "v_in_k": True}, "takes up to 64"),
            ({"seqlen_q": ONE_TILE + 1, "head_dim": 257}, "takes up to 64"),
            ({"seqlen_q": ALL_TILES + 1, **LATENT}, "takes up to 2048"),
            ({"seqlen_q": ONE_TILE + 1, "total_q": 999}, "takes up to 64"),
            ({"seqlen_q": ONE_TILE + 1, **E4M3}, "takes up to 64"),
            ({"seqlen_q": FOUR_TILES + 1, "total_q": 999, **E4M3}, "takes up to 256"),
            ({"seqlen_q": ONE_TILE + 1, **FP8}, "takes up to 64"),
            ({"seqlen_q": ONE_TILE + 1, "used_k": True}, "takes up to 64"),
        ],
    ),
    g.few_packed_rows: (
        [{"seqlen_q": ONE_TILE}, {"seqlen_q": FOUR_TILES, "total_q": 999}],
        [
            ({"seqlen_q": ONE_TILE + 1}, "takes up to 64"),
            ({"seqlen_q": FOUR_TILES + 1, "total_q": 999}, "takes up to 256"),
        ],
    ),
    g.wide_heads: (
        [
            {"head_dim": 256, "head_dim_v": 256},
            LATENT,
            {**LATENT, "head_dim": 320, "head_dim_v": 256},
            {**LATENT, **E4M3},
        ],
        [
            (
                {"head_dim": 257, "head_dim_v": 1},
                "head_dim 257: above 256 takes a V that is a view",
            ),
            ({"head_dim": 1, "head_dim_v": 257}, "above 256 takes a V that is a view of K"),
            ({**LATENT, **FLOAT32}, "takes caches of 16 bits, or of 8 with scales of heads"),
            ({**LATENT, **FP8}, "takes caches of 16 bits, or of 8 with scales of heads"),
            ({**LATENT, **E4M3, "kv_group": 64}, "takes caches of 16 bits, or of 8 with scales"),
            ({**LATENT, "kv_dtype": "int4"}, "takes caches of 16 bits, or of 8 with scales"),
            ({**LATENT, "head_dim": 321, "head_dim_v": 256}, "takes 64 more than V's 256 or 512"),
            ({**LATENT, "head_dim": 260, "head_dim_v": 255}, "takes 64 more than V's 256 or 512"),
        ],
    ),
    g.bfloat16_beside_rows: (
        [{"kv_dtype": LATENT_ROWS}, {"dtype": "float16"}],
        [({"kv_dtype": LATENT_ROWS, "dtype": "float16"}, "float16 queries over fp8_ds_mla")],
    ),
    g.values_in_keys: (
        [LATENT, {**LATENT, "head_dim": 513}],
        [
            ({**LATENT, "head_dim": 512}, "512 and 512: takes V of 512 and K of up to 64 columns"),
            ({**LATENT, "head_dim_v": 511}, "576 and 511: takes V of 512"),
            ({**LATENT, "v_in_k": False}, "takes a V that is a view of K"),
        ],
    ),
    g.sdpa_mask: (
        [
            {"causal": True, "seqlen_q": 512},
            {"causal": True, "seqlen_q": 1, "used_k": True},
            TOP_LEFT,
            {"mask": MaskSpec.of(False, shift=1)},
        ],
        [
            ({"mask": MaskSpec.of(True, shift=1)}, "shifted causal mask"),
            ({"causal": True}, "causal mask of unequal lengths"),
            ({"causal": True, "used_k": True}, "causal mask of unequal lengths"),
            ({"causal": True, "seqlen_q": 1}, "causal mask of unequal lengths"),
            ({"causal": True, "seqlen_q": 1, "used_q": True}, "causal mask of unequal lengths"),
            ({"causal": True, "seqlen_k": 1, "used_k": True}, "causal mask of unequal lengths"),
        ],
    ),
    g.sdpa_lengths: (
        [
            TOP_LEFT,
            {"seqlen_q": 1, "used_k": True},
            {"seqlen_q": 1, "used_k": True, "causal": True},
            {"seqlen_q": 1, "used_k": True, "mask": MaskSpec.of(False, bottom_right=False)},
            {"needs_grad": True},
        ],
        [
            ({"used_q": True}, "lengths of queries"),
            ({"used_k": True}, "lengths of keys beside 64 queries: takes single queries"),
            ({"used_k": True, "seqlen_k": 1}, "lengths of keys beside 64 queries"),
            ({"used_k": True, "seqlen_q": 0}, "lengths of keys beside 0 queries"),
            ({"used_k": True, "seqlen_q": 1, **TOP_LEFT}, "causal mask aligned top left"),
            ({"used_k": True, "seqlen_q": 1, "needs_grad": True}, "and a later backward"),
        ],
    ),
    g.sdpa_log_sum_exp: (
        [{}, {"return_lse": True, "used_k": True}, {"needs_grad": True, "heads_q": 1}]
        + [{"batch": 0}, {"return_lse": True, "heads_q": 1, "batch": 1, "seqlen_k": 1}],
        [
            ({"return_lse": True}, "gradients of fewer KV heads than query heads"),
            ({"needs_grad": True}, "gradients of fewer KV heads than query heads"),
            ({"return_lse": True, "used_q": True}, "of fewer KV heads than query heads"),
            ({"return_lse": True, "heads_q": 2}, "of fewer KV heads than query heads"),
            *(
                ({"return_lse": True, "heads_q": 1, name: 0}, "or gradients without tokens")
                for name in ("batch", "seqlen_q", "seqlen_k")
            ),
        ],
    ),
    g.float_out_unpaged: (
        [{"page_size": 16}, {"out_dtype": "float32"}],
        [({"page_size": 16, "out_dtype": "float32"}, "float32 output over keys in pages")],
    ),
}


def problem(facts: dict) -> AttentionProblem:
    base = {"batch": 2, "seqlen_q": 64, "seqlen_k": 512, "heads_q": 4, "heads_k": 1}
    dim_v = min(facts.get("head_dim", 128), 512)
    return AttentionProblem.dense(**{**base, "head_dim_v": dim_v, **facts})


def device_of(gate):
    return by_name("RTX 4090" if gate is g.wide_float32 else "H200")


@pytest.mark.parametrize("gate", BORDERS, ids=lambda gate: gate.__name__)
def test_a_gate_turns_at_its_borders(gate):
    device = device_of(gate)
    taken, refused = BORDERS[gate]
    assert [gate(problem(facts), device) for facts in taken] == [None] * len(taken)
    for facts, words in refused:
        assert words in f"{gate(problem(facts), device)}.", facts


@pytest.mark.parametrize("device", ["H200", "MI300X"])
def test_shared_memory_bounds_wide_heads_of_float32_on_nvidia_parts(device):
    asked = problem({"head_dim": 257, **FLOAT32})
    for size, is_enough in ((128 * 1024, True), (128 * 1024 - 1, device == "MI300X")):
        said = g.wide_float32(asked, by_name(device).live(shared_bytes=size))
        assert (said is None) == is_enough


@pytest.mark.parametrize("facts", [BIASED_TREE, {"bias": True}, {"tree_mask": True}])
def test_a_biased_tree_wants_a_later_triton_on_amd_parts(facts):
    wanted = [g.least_of_biased_trees(problem(facts), by_name(name)) for name in ("H200", "MI300X")]
    assert wanted == [(), (("triton", (3, 7)),) if facts == BIASED_TREE else ()]


def test_every_gate_of_a_kernel_is_told_here_or_by_the_golden_table():
    told_by_the_table = {
        *(g.one_diagonal_of_bias, g.scales_of_groups, g.scales_of_heads, g.fp8_conversion),
        *(g.one_bias, g.used_queries_packed, g.equal_head_dims, g.float_out, g.own_e4m3),
    }
    known = {gate for row in VARIANTS for gate in row.gates if gate.__module__ == g.__name__}
    assert known <= told_by_the_table | set(BORDERS)
