"""From the caller's tensors to the operands that kernels take, by views wherever possible."""

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.core.base.numbers import LONGEST
from heedful.core.call.operands import LENGTHS, SCALES, Operands, own_shape
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.storage import are_mappable, mask_dtype
from heedful.torch.base.forked import on_own_thread
from heedful.torch.operands.checks import FLOATS

_ROWS = ("q", "k", "v", *LENGTHS, "origins", "block_table")
_ROWS += ("sink", "rel_bias", "alibi_slopes", "tree_mask", "key_ranges")
_ROWS += ("block_rows", "block_keys", "block_bits")
_INDEX = {name: index for index, name in enumerate(Operands._fields)}
_new = tuple.__new__

# Changes a list of the fields of Operands in place.
Step = Callable[[list], None]


def adapt(x: Operands, steps: tuple[Step, ...]) -> Operands:
    """The operands after these steps, which `adaptations` found for this kind of call."""
    fields = list(x)
    for step in steps:
        step(fields)
    return _new(Operands, fields)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype, by one launch on a GPU; contiguous. On a CPU, where values are
    checked, ints beyond int32 become the nearest int32."""
    if dtype == torch.int32 and tensor.device.type == "cpu":
        tensor = tensor.clamp(-LONGEST, LONGEST)
    return tensor.to(dtype, memory_format=torch.contiguous_format)


def cast_steps(dtypes: dict[str, str]) -> tuple[Step, ...]:
    """The changes of operands to these dtypes, which `core.call.storage.casts` found."""
    return tuple([_cast(_INDEX[name], getattr(torch, dtype)) for name, dtype in dtypes.items()])


def adaptations(x: Operands, problem: AttentionProblem) -> tuple[Step, ...]:
    """The changes that make checked tensors what Operands says: expansion by strides of 0; copies
    of q, k, v and small tensors whose last dim is not contiguous."""
    # Scales per head have a stride for heads; those of groups are rows.
    rows = _ROWS + (SCALES if problem.kv_group else ())
    steps = [
        _copy(_INDEX[name])
        for name in rows
        if (tensor := getattr(x, name)) is not None and not _has_dense_rows(tensor)
    ]
    if x.block_table is not None and x.cu_seqlens_q is not None:
        steps.append(_lengths_of_pages)
    if x.bias is not None and x.bias.dtype == torch.bool:
        steps.append(_number_bias(getattr(torch, mask_dtype(problem.dtype))))
    if x.bias is not None and problem.bias_grad and _is_expanded(x.bias):
        # Each element of an expanded bias has its own gradient.
        steps.append(_copy(_INDEX["bias"]))
    if x.origins is not None and not problem.origins:
        steps.append(_without_origins)
    if x.seed is not None and x.seed.dim() != 1:
        steps.append(_reshape_seed)
    return tuple(steps + _expansions(x, problem))


def _expansions(x: Operands, problem: AttentionProblem) -> list[Step]:
    batch, heads = problem.batch, problem.heads_q
    shapes = {
        "bias": (batch, heads, problem.seqlen_q, problem.seqlen_k),
        "alibi_slopes": (batch, heads),
        "tree_mask": (batch, problem.seqlen_q, problem.seqlen_q),
    }
    if not problem.varlen_q:
        rows = batch, heads, problem.seqlen_q
        shapes["key_ranges"] = (*rows, 2 * problem.key_ranges)
    if x.block_rows is not None:
        for name in ("block_rows", "block_keys"):
            shapes[name] = (batch, heads, *getattr(x, name).shape[2:])
    shapes |= {name: (batch, problem.heads_k) for name in SCALES}
    return [
        _expand(_INDEX[name], shape)
        for name, shape in shapes.items()
        if (tensor := getattr(x, name)) is not None
        and tensor.shape != shape
        # Scales of groups are stored like the cache.
        and not (name in SCALES and tensor.dim() > 2)
    ]


def _copy(index: int) -> Step:
    def step(fields: list) -> None:
        fields[index] = on_own_thread(fields[index].contiguous)

    return step


def _cast(index: int, dtype: torch.dtype) -> Step:
    def step(fields: list) -> None:
        fields[index] = on_own_thread(cast, fields[index], dtype)

    return step


def _expand(index: int, shape: tuple) -> Step:
    def step(fields: list) -> None:
        fields[index] = fields[index].expand(shape)

    return step


def _number_bias(dtype: torch.dtype) -> Step:
    def step(fields: list) -> None:
        bias = fields[_INDEX["bias"]]
        unexpanded = bias[tuple([slice(size) for size in own_shape(bias.shape, bias.stride())])]
        fields[_INDEX["bias"]] = on_own_thread(_numbers, unexpanded, dtype).expand(bias.shape)

    return step


def _numbers(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where True, else -inf."""
    made = seen.new_empty(seen.shape, dtype=dtype)
    if seen.device.type == "cpu":
        # The logarithm would be computed in memory of float32.
        return made.fill_(-torch.inf).masked_fill_(seen, 0.0)
    return torch.log(seen, out=made)


def _without_origins(fields: list) -> None:
    """Nothing is drawn."""
    fields[_INDEX["origins"]] = None


def _reshape_seed(fields: list) -> None:
    fields[_INDEX["seed"]] = fields[_INDEX["seed"]].reshape(1)


def _lengths_of_pages(fields: list) -> None:
    """Replaces cu_seqlens_k by lengths: pages are found through the table."""
    bounds, used = _INDEX["cu_seqlens_k"], _INDEX["seqused_k"]
    if fields[used] is None:
        fields[used] = fields[bounds][1:] - fields[bounds][:-1]
    fields[bounds] = None


def _has_dense_rows(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last dim has another stride than 1."""
    return tensor if _has_dense_rows(tensor) else on_own_thread(tensor.contiguous)


def is_mappable(tensor: Tensor) -> bool:
    """Whether a tensor map can be made of rows: base and strides are multiples of 16 bytes, and no
    dim is broadcast."""
    aligned = tensor.data_ptr() % 16 == 0
    return aligned and are_mappable(tensor.shape, tensor.stride(), tensor.element_size())


def _is_expanded(tensor: Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def bias_gradient(dbias: Tensor, shape: tuple) -> Tensor:
    """The gradient in the shape of the caller's bias."""
    return dbias.sum_to_size((1,) * (4 - len(shape)) + tuple(shape)).reshape(shape)


def autocast(tensors: tuple, device_type: str) -> tuple:
    """q, k, v and bias, the first four, in autocast's dtype; fp8, float64 and None stay."""
    dtype = torch.get_autocast_dtype(device_type)
    cast = (
        on_own_thread(t.to, dtype)
        if isinstance(t, Tensor) and t.dtype in FLOATS and t.dtype != dtype
        else t
        for t in tensors
    )
    return tuple(cast)
