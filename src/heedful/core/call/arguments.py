"""One call of an attention function, whatever the framework: its arguments by name.

`Operands` and `Options` alone know the order of a call's arguments; all others name them.
"""

from types import MethodType
from typing import Any, NamedTuple

from heedful.core.base import numbers
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.numbers import ints, real, truth, whole, wrong_type
from heedful.core.call.numerics import with_block_mask, with_documents, with_numerics
from heedful.core.call.operands import Operands

# The dropout origin of a call that is no shard.
WHOLE = (0, 0, 0, 0)
# No bound on what a query sees. Functions know it by identity and do not check it again, since
# (-1.0, -1) equals it; but not where they are traced: Dynamo of torch 2.11 compares no identities.
UNBOUNDED = (-1, -1)
_LARGEST_ORIGIN = 2**32 - 1
# The types that these arguments must have.
OFFSET = "an int, None or an int32 array (batch,)"
WINDOW = "(left, right) or (left, right, first), each an int"
ORIGIN = f"(batch, head, row, column), each an int from 0 to {_LARGEST_ORIGIN}"
# The option beside an array of origins, of whose columns no kernel may take one to be a multiple of
# 4. Where they count in fours it is WHOLE.
_ANY_COLUMNS = (0, 0, 0, 1)


# return_max_logits of each row, and not of each head.
ROWS = "rows"


class Options(NamedTuple):
    """The arguments of one call that are plain values.

    kind: "dense", "varlen" or "kvcache", which decides the layouts and the names in messages.
    max_seqlen_q, max_seqlen_k: of varlen calls, else None. return_max_logits: of rows.
    """

    kind: Any
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    dropout_p: Any = 0.0
    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = UNBOUNDED
    softcap: Any = 0.0
    deterministic: Any = False
    return_attn_probs: Any = False
    return_lse: Any = False
    return_max_logits: Any = False
    num_splits: Any = 0
    q_offset: Any = None
    backend: Any = None
    dropout_origin: Any = WHOLE


class CacheUpdate(NamedTuple):
    """The update of a KV cache before attention: arguments of flash_attn_with_kvcache."""

    k: Any = None
    v: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    cache_seqlens: Any = None
    rotary_interleaved: Any = None
    shared_prefix: Any = None

    @property
    def position0(self) -> int:
        """Tokens before the cache of every sequence."""
        return 0 if self.shared_prefix is None else self.shared_prefix[0].shape[-3]


class Quads(NamedTuple):
    """Columns of dropout_origin that are counted in fours: kernels that draw four columns at a time
    take them, whatever their values. count: an array (batch, 4) whose columns count so. JAX also
    takes one as the column of a single place: an int or a traced integer without dims."""

    count: Any


class AttentionCall(NamedTuple):
    """The facts about a call that need no look into its arrays.

    x: ArraySpecs, laid out as the caller gave them. needs_grad, bias_grad, rel_bias_grad: whether
    a backward will follow, and whether it is to give the gradients of these two. out: where the
    result goes, if the caller says so. v_in_k: v is a view of the first columns of k.
    """

    x: Operands
    options: Options
    needs_grad: bool = False
    bias_grad: bool = False
    rel_bias_grad: bool = False
    out: ArraySpec | None = None
    v_in_k: bool = False


# They make instances in less than half the time of a call of the class.
new_options = MethodType(Options.__new__, Options)
new_operands = MethodType(Operands.__new__, Operands)
new_update = MethodType(CacheUpdate.__new__, CacheUpdate)

# The options whose values may equal a value of another type, as 1 equals True and 1.0.
NUMBERS = slice(Options._fields.index("dropout_p"), Options._fields.index("backend"))
# The operands after q, k and v of a call that has none of them.
ABSENT = (None,) * (len(Operands._fields) - 3)

# The public names of operands that have others.
_OTHER_NAMES = {"seed": "dropout_seed", "q_offsets": "q_offset", "origins": "dropout_origin"}
# The names of flash_attn_with_kvcache, where they differ from our own.
_KVCACHE_NAMES = {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "kv_batch_idx": "cache_batch_idx",
    "leftpad_k": "cache_leftpad",
    "return_lse": "return_softmax_lse",
}


def argument_name(name: str, kind: str) -> str:
    """The name of the public argument that an operand or an option comes from."""
    name = _OTHER_NAMES.get(name, name)
    return _KVCACHE_NAMES.get(name, name) if kind == "kvcache" else name


def is_asked(return_max_logits: Any) -> Any:
    """Whether largest scores are wanted; they are computed of rows. ValueError for another word."""
    if not isinstance(return_max_logits, str):
        return return_max_logits
    if return_max_logits != ROWS:
        raise ValueError(f"return_max_logits must be a bool or {ROWS!r}, got {return_max_logits!r}")
    return True


def one_sink(sink: Any, s_aux: Any, learnable_sink: Any) -> Any:
    """The sink, which has three names. TypeError where more than one is given."""
    named = {"sink": sink, "s_aux": s_aux, "learnable_sink": learnable_sink}
    passed = [name for name, value in named.items() if value is not None]
    if len(passed) > 1:
        raise TypeError(f"sink must be given by one of its names, got {' and '.join(passed)}")
    return named[passed[0]] if passed else None


def bind(kind: str, arguments: dict[str, Any]) -> tuple[Operands, Options, CacheUpdate]:
    """The parts of a call of this kind, made from its public arguments by name. Raises TypeError
    for a sink of two names."""
    names = ("sink", "s_aux", "learnable_sink")
    arguments = {**arguments, "sink": one_sink(*[arguments.get(name) for name in names])}

    def picked(fields: tuple[str, ...]) -> dict[str, Any]:
        names = {field: argument_name(field, kind) for field in fields}
        return {field: arguments[name] for field, name in names.items() if name in arguments}

    x = Operands(**{**picked(Operands._fields), "seed": None})
    options = Options(**{**picked(Options._fields), "kind": kind})
    more = [arguments.get(name) for name in ("numerics", "sm_margin")]
    backend = with_numerics(options.backend, *more)
    backend, ranges = with_documents(backend, x.key_ranges)
    backend = with_block_mask(backend, arguments.get("block_mask"))
    x, options = x._replace(key_ranges=ranges), options._replace(backend=backend)
    # One argument: an array where each sequence has its own.
    if getattr(options.q_offset, "ndim", 0):
        options = options._replace(q_offset=None)
    else:
        x = x._replace(q_offsets=None)
    origin, origins = origin_of_each(options.dropout_origin)
    x, options = x._replace(origins=origins), options._replace(dropout_origin=origin)
    update = CacheUpdate()
    if kind == "kvcache":
        update = CacheUpdate(**{name: arguments[name] for name in CacheUpdate._fields})
        x = x._replace(seqused_k=None)
    return x, options, update


def split(args: tuple) -> tuple[Operands, Options, tuple]:
    """Operands, options and the rest of the arguments of an operator, which come in this order."""
    end = len(Operands._fields) + len(Options._fields)
    options = Options._make(args[len(Operands._fields) : end])
    return Operands._make(args[: len(Operands._fields)]), options, args[end:]


def plain_window(window_size: Any, whole=whole) -> tuple[int, ...]:
    """`window_size` as a tuple of ints. It may be any sequence or array of anything with
    `__index__`; bounds of FAR or more become FAR. MaskSpec checks its length and least values.
    whole: makes an int of an entry.

    Raises TypeError, or ValueError where it is no sequence.
    """
    return numbers.window(ints("window_size", window_size, WINDOW, whole))


def plain_origin(origin: Any, whole=whole) -> tuple[int, ...]:
    """`dropout_origin` as four ints. Raises TypeError or ValueError."""
    plain = ints("dropout_origin", origin, ORIGIN, whole)
    if len(plain) != 4 or not all(0 <= place <= _LARGEST_ORIGIN for place in plain):
        raise ValueError(f"dropout_origin must be {ORIGIN}, got {origin!r:.100}")
    return plain


def origin_of_each(origin: Any) -> tuple[Any, Any]:
    """(dropout_origin, None), or the option beside the array (batch, 4) where each sequence has its
    own place, and that array. Raises TypeError for other Quads."""
    quads = origin.__class__ is Quads
    array = origin.count if quads else origin
    if getattr(array, "ndim", 0) != 2:
        if quads:
            wrong_type("dropout_origin", "Quads of an array (batch, 4)", array)
        return origin, None
    return (WHOLE if quads else _ANY_COLUMNS), array


def plain_options(options: Options, whole=whole, real=real, truth=truth) -> Options:
    """The options with plain values. A value that is plain already stays the same object.

    whole, real, truth: make an int, a float, a bool of an argument (name, value). Raises TypeError
    or ValueError naming the argument.
    """
    kind, scale = options.kind, options.softmax_scale
    if options.backend is not None and not isinstance(options.backend, str):
        wrong_type("backend", "a str or None", options.backend)
    longest_q, longest_k, offset = options.max_seqlen_q, options.max_seqlen_k, options.q_offset
    if kind == "varlen":
        longest_q = whole("max_seqlen_q", longest_q)
        longest_k = whole("max_seqlen_k", longest_k)
    return Options(
        kind=kind,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        dropout_p=real("dropout_p", options.dropout_p),
        softmax_scale=None if scale is None else real("softmax_scale", scale),
        causal=truth("causal", options.causal),
        window_size=plain_window(options.window_size, whole),
        softcap=real("softcap", options.softcap),
        deterministic=truth("deterministic", options.deterministic),
        return_attn_probs=truth("return_attn_probs", options.return_attn_probs),
        return_lse=truth(argument_name("return_lse", kind), options.return_lse),
        return_max_logits=truth("return_max_logits", is_asked(options.return_max_logits)),
        num_splits=numbers.parts(whole("num_splits", options.num_splits)),
        q_offset=None if offset is None else whole("q_offset", offset, OFFSET),
        backend=options.backend,
        dropout_origin=plain_origin(options.dropout_origin, whole),
    )
