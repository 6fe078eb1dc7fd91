"""The mask function of transformers' `AttentionMaskInterface`. It returns None where layers need no
mask, lengths where these are enough, and else a bool mask of queries x keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers import masking_utils

from heedful.core.base.entered import PLANS
from heedful.integrations.transformers.compact import Compact, known_mask, of_rows
from heedful.integrations.transformers.over_ranks import mask_over_ranks
from heedful.integrations.transformers.paths import tell_why
from heedful.integrations.transformers.patterns import Pattern, Request, find, find_traced

# How many documents a row of a batch may have in compiled code, where shapes have to be known.
MOST_DOCUMENTS = 256


class Place(NamedTuple):
    """Where the queries and the keys of a call lie.

    begin: the key that stands where the first query does. end: the key after the last query's; a
    tensor where a static cache counts on the device.
    """

    batch: int
    q_length: int
    kv_length: int
    begin: int | Tensor
    device: torch.device | str

    @property
    def end(self) -> int | Tensor:
        return self.begin + self.q_length

    @property
    def is_static(self) -> bool:
        return isinstance(self.begin, Tensor)

    @property
    def ends_with_keys(self) -> bool:
        """Whether the last query is known to stand at the last key."""
        return not self.is_static and bool(self.end == self.kv_length)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """The mask of a model's layers, from the arguments of transformers' own mask functions.

    Args:
        attention_mask: bool (batch, tokens), where a token counts. It is read once, which waits for
            the device; compiled code does not read it, and has the device check it.

    Returns:
        None: causal or bidirectional as the layer is, without padding, and no window that hides
        something. A compact mask (see `compact`): what lengths and a window say. A bool mask
        (batch, 1, q_length, kv_length): anything else.
    """
    request = Request(
        mask_function,
        use_vmap,
        local_size,
        allow_is_causal_skip,
        allow_is_bidirectional_skip,
        config,
        attention_mask is None and 1 < q_length == kv_length and not isinstance(q_offset, Tensor),
    )
    place = Place(batch_size, q_length, kv_length, q_offset - kv_offset, device)
    pattern = (find_traced if is_compiling() else find)(request)
    if PLANS:
        return mask_over_ranks(pattern, attention_mask, batch_size * q_length, device)
    padding = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = padding[:, kv_offset : kv_offset + kv_length]  # pyright: ignore[reportOptionalSubscript]
    made: Tensor | str | None
    made = (
        pattern if isinstance(pattern, str) else _of_lengths(pattern, place, padding, mask_function)
    )
    if not isinstance(made, str):
        return made
    bools = masking_utils.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,  # pyright: ignore[reportArgumentType]
        kv_offset,
        mask_function,
        attention_mask,
        local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
        **others,
    )
    return None if bools is None else tell_why(bools, made)


def _of_lengths(
    pattern: Pattern, place: Place, padding: Tensor | None, mask_function: Callable
) -> Tensor | str | None:
    """The mask of a pattern: none, a compact one, or the reason why it must be a bool mask."""
    if pattern.documents is not None:
        if padding is not None or not place.ends_with_keys or place.q_length != place.kv_length:
            return "documents beside padding or a cache"
        if isinstance(pattern.documents, bool):
            return documents_traced(mask_function, pattern.left, place)
        ids = pattern.documents.expand(place.batch, -1)
        return documents(ids, pattern.causal, pattern.left, place.device).as_mask()
    if pattern.causal and not place.is_static and place.end > place.kv_length:
        return "queries that stand past the last key"
    if not pattern.causal and _hides(pattern, place) and not place.ends_with_keys:
        return "a window to both sides, with keys after the last query"
    if padding is None:
        return _unpadded(pattern, place)
    return (_padded_traced if is_compiling() else _padded)(pattern, place, padding)


def _hides(pattern: Pattern, place: Place) -> bool:
    """Whether the window of a pattern hides any key."""
    return 0 <= pattern.left < place.kv_length - 1


def _unpadded(pattern: Pattern, place: Place) -> Tensor | None:
    whole = not pattern.causal or place.ends_with_keys
    if whole and not _hides(pattern, place):
        return None
    if not place.is_static and not is_compiling():
        keys = [0] * place.batch, [place.kv_length] * place.batch
        return _of_known_rows(pattern, place, keys, whole, pattern.causal)
    first = torch.zeros(place.batch, dtype=torch.int32, device=place.device)
    last = _last_seen(torch.full_like(first, place.kv_length), pattern, place)
    return _of_rows(pattern, place, (first, last), whole, pattern.causal)


def _padded(pattern: Pattern, place: Place, padding: Tensor) -> Tensor | str | None:
    """As `_of_lengths`: one wait for the device."""
    # By row how many tokens count, and how many lie before and after them.
    kept = padding.bool().view(torch.uint8)
    facts = [padding.sum(1), kept.argmax(1), kept.flip(1).argmax(1)]
    if isinstance(place.begin, Tensor):
        facts.append(place.begin.reshape(-1)[:1].long())
    read = torch.cat(facts).tolist()
    rows = padding.shape[0]
    count, first, after = read[:rows], read[rows : 2 * rows], read[2 * rows : 3 * rows]
    if isinstance(place.begin, Tensor):
        place = place._replace(begin=read[-1])
    last = [place.kv_length - n if c else 0 for n, c in zip(after, count, strict=True)]
    if any([end - start != n for start, end, n in zip(first, last, count, strict=True)]):
        return "an attention_mask with holes inside of a sequence"
    is_full = all([n == place.kv_length for n in count])
    whole = is_full and (not pattern.causal or place.ends_with_keys)
    # Padding to the right of a causal mask: what counts sees none of it.
    from_start = place.begin == 0 and place.ends_with_keys
    whole = bool(whole or (pattern.causal and not any(first) and from_start))
    if whole and not _hides(pattern, place):
        return None
    has_last = pattern.causal and all([end >= place.end for end in last])
    return _of_known_rows(pattern, place, (first, last), whole, has_last)


def _padded_traced(pattern: Pattern, place: Place, padding: Tensor) -> Tensor:
    """As `_padded` in compiled code: the device checks what the host does not know."""
    places = torch.arange(place.kv_length, device=padding.device)
    count = padding.sum(1)
    first = padding.int().argmax(1)
    last = first + count
    _check_there(
        (padding == ((places >= first[:, None]) & (places < last[:, None]))).all(),
        "heedful: compiled code takes no attention_mask with holes in a sequence",
    )
    return _of_rows(pattern, place, (first, _last_seen(last, pattern, place)), False, False)


def _of_known_rows(
    pattern: Pattern, place: Place, keys: tuple[list[int], list[int]], whole: bool, has_last: bool
) -> Tensor:
    """As `_of_rows` of numbers that the host knows: one copy to the device."""
    first, last = keys
    begin, stop = [0] * len(first), [place.q_length] * len(first)
    if pattern.causal:
        last = [min(end, int(place.end)) for end in last]
    if pattern.causal or pattern.left >= 0:
        # A query stands at a key of its own.
        begin, stop = (
            [max(0, min(int(key - place.begin), place.q_length)) for key in ends]
            for ends in (first, last)
        )
    return known_mask(
        (begin, stop, first, last),
        (place.q_length, place.kv_length),
        place.device,
        has_last,
        causal=pattern.causal,
        left=pattern.left if _hides(pattern, place) else -1,
        whole=whole,
    )


def _last_seen(last: Tensor, pattern: Pattern, place: Place) -> Tensor:
    """Where the keys end that any query of a causal mask sees."""
    if not pattern.causal:
        return last
    end = torch.as_tensor(place.end, dtype=last.dtype, device=last.device)
    return torch.minimum(last, end.reshape(-1))


def _of_rows(
    pattern: Pattern, place: Place, keys: tuple[Tensor, Tensor], whole: bool, has_last: bool
) -> Tensor:
    """The compact mask of one sequence in each row. keys: (first, last) of each, (batch,).
    has_last: the queries are each row's last tokens."""
    first, last = keys
    if pattern.causal or pattern.left >= 0:
        # Each query has the position of a key.
        begin = (first - place.begin).clamp(0, place.q_length)
        stop = (last - place.begin).clamp(0, place.q_length)
    else:
        begin, stop = torch.zeros_like(first), torch.full_like(first, place.q_length)
    lengths = place.q_length, place.kv_length
    made = Compact(
        **of_rows(begin, stop, first, last, lengths),
        causal=pattern.causal,
        left=pattern.left if _hides(pattern, place) else -1,
        whole=whole,
        seqused_k=(last - first).int() if has_last else None,
        leftpad_k=first.int() if has_last else None,
    )
    return made.as_mask()


def _check_there(holds: Tensor, words: str) -> None:
    """Makes the device raise unless a bool () is true."""
    torch._assert_async(holds, words)  # pyright: ignore[reportPrivateImportUsage]


def documents(ids: Tensor, causal: bool, left: int, device: torch.device | str) -> Compact:
    """The sequences of packed documents; waits for the device once. ids: (batch, length), by token
    its document; no document goes on in the next row."""
    ids = ids.to(device)
    is_new = torch.ones_like(ids, dtype=torch.bool)
    is_new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = is_new.reshape(-1).nonzero().squeeze(1)
    cu = torch.cat([starts, starts.new_full((1,), ids.numel())]).int()
    return Compact(cu, cu, cu.diff(), cu.diff(), causal, left)


def documents_traced(mask_function: Callable, left: int, place: Place) -> Tensor:
    """As `documents` in compiled code: of a static shape, and without a wait. A document begins
    where a token does not see the one before it. The device raises if the mask is not causal by
    documents, or has more than MOST_DOCUMENTS of them in a row."""
    batch, length = place.batch, place.q_length
    position = torch.arange(length, device=place.device)[None]
    row = torch.arange(batch, device=place.device)[:, None]
    head = torch.zeros_like(position)
    sees_before = mask_function(row, head, position, (position - 1).clamp(min=0)).expand(
        batch, length
    )
    sees_after = mask_function(row, head, position, (position + 1).clamp(max=length - 1))
    _check_there(
        (~sees_after | (position == length - 1)).all(),
        "heedful: in compiled code a mask without padding has to be causal by documents",
    )
    is_new = (~sees_before | (position == 0)).reshape(-1)
    document = is_new.int().cumsum(0) - 1
    tokens, most = batch * length, batch * min(MOST_DOCUMENTS, length)
    _check_there(
        document[-1] < most, f"heedful: compiled code takes {MOST_DOCUMENTS} documents a row"
    )
    places = torch.arange(tokens, device=place.device)
    cu = places.new_full((most + 1,), tokens)
    cu = cu.scatter_reduce(0, document.long().clamp(max=most), places, "amin").int()
    return Compact(cu, cu, cu.diff(), cu.diff(), True, left).as_mask()
