"""Random cases over the whole feature product, for Hypothesis."""

from dataclasses import replace

from hypothesis import strategies as st

from support.problems.cases import LAYOUTS, Case

HEAD_DIMS = (1, 3, 8, 16, 20, 32, 64)
PAGE_SIZES = (1, 4, 16, 29)


@st.composite
def cases(
    draw,
    dtypes=("float32", "float16", "bfloat16"),
    head_dims=HEAD_DIMS,
    longest: int = 70,
    without: frozenset[str] | set[str] = frozenset(),
) -> Case:
    """A case of any combination of features that one call may have.

    without: names of Case fields to leave at their defaults, for backends or test tiers that
    lack a feature or may not compile another variant for it.
    """

    def maybe(name: str, strategy, default):
        # Each feature is off more often than on, so that failures shrink to few features.
        if name in without or draw(st.integers(0, 2)) != 0:
            return default
        return draw(strategy)

    flag = st.just(True)
    heads_k = draw(st.sampled_from((1, 2, 3)))
    group = maybe("heads_k", st.sampled_from((2, 3, 5)), 1)
    seqlen_q = draw(st.integers(0, longest))
    seqlen_k = seqlen_q if draw(st.booleans()) else draw(st.integers(0, longest))
    page_size = maybe("page_size", st.sampled_from(PAGE_SIZES), 0)
    bounds = st.integers(-1, longest)
    firsts = st.integers(0, 9)
    window = maybe(
        "window", st.tuples(bounds, bounds) | st.tuples(bounds, bounds, firsts), (-1, -1)
    )
    varlen = maybe("varlen", st.sampled_from(("q", "k", "qk")), "")
    origins = st.tuples(*[st.integers(0, 2**32 - 1) for _ in range(4)])
    case = Case(
        batch=draw(st.sampled_from((2, 1, 3, 2, 3, 1, 2, 0))),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_k * group,
        heads_k=heads_k,
        head_dim=draw(st.sampled_from(head_dims)),
        head_dim_v=maybe("head_dim_v", st.sampled_from(head_dims), 0),
        dtype=draw(st.sampled_from(dtypes)),
        causal=maybe("causal", flag, False),
        window=window,
        bottom_right=not maybe("bottom_right", flag, False),
        shift=maybe("shift", st.integers(-longest, longest), 0),
        scale=maybe("scale", st.integers(-20, 20).filter(bool).map(lambda n: n / 10), 0.0),
        softcap=maybe("softcap", st.integers(1, 60).map(lambda n: n / 2), 0.0),
        dropout_p=maybe("dropout_p", st.integers(1, 20).map(lambda n: n / 20), 0.0),
        dropout_origin=maybe("dropout_origin", origins, (0, 0, 0, 0)),
        origins=maybe("origins", st.sampled_from((1, 4)), 0),
        alibi=maybe("alibi", st.sampled_from(("h", "bh")), ""),
        bias=maybe("bias", st.sampled_from(("bhqk", "hqk", "bqk", "qk", "bk", "k", "q")), ""),
        rel_bias=maybe("rel_bias", st.sampled_from((1, 2, 9, 200)), 0),
        sink=maybe("sink", flag, False),
        tree_mask=maybe("tree_mask", flag, False),
        key_ranges=maybe("key_ranges", st.sampled_from((1, 2)), 0),
        ranges_of=draw(st.sampled_from(("b", "", "h", "bh")))
        if not {"key_ranges", "block_mask"} <= set(without)
        else "b",
        varlen=varlen,
        used=maybe("used", st.sampled_from(("q", "k", "qk")), ""),
        page_size=page_size,
        kv_batch_idx=not page_size and "k" not in varlen and maybe("kv_batch_idx", flag, False),
        leftpad_k=maybe("leftpad_k", flag, False),
        q_offsets=maybe("q_offsets", flag, False),
        layout=maybe("layout", st.sampled_from(LAYOUTS), "contiguous"),
        backward="backward" not in without and draw(st.booleans()),
        lse_grad=maybe("lse_grad", flag, False),
        return_probs=maybe("return_probs", flag, False),
        seed=draw(st.integers(0, 2**16)),
    )
    return replace(case, block_mask=maybe("block_mask", st.sampled_from((32, 64)), 0))
