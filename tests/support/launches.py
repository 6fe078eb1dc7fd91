"""Recorded launches by operand: the one place in the tests that knows kernels' parameters by name.

Axes of strides are letters: b batch, h head, m query row, n key row or page row, s split.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from support.runs.standin import Launch, Map

# What a kernel does, by its function's name.
_ROLES = {
    "attention_forward": "forward",
    "attention_in_parts": "forward",
    "forward": "forward",
    "forward_wide": "forward",
    "decode": "forward",
    "mla": "forward",
    "mla_swap_ab": "forward",
    "mla_converting": "forward",
    "mla_converting_pair": "forward",
    "combine_splits": "merge",
    "merge_parts": "merge",
    "clear_unused": "clear",
    "clear_outside": "clear outside",
    "signed_probabilities": "probabilities",
    "query_gradients": "query gradients",
    "key_gradients": "key gradients",
    "backward_prologue": "prepare gradients",
    "backward": "gradients",
    "backward_wide": "gradients",
    "backward_pair": "gradients",
    "backward_epilogue": "finish query gradients",
    "bias_gradients": "bias gradients",
    "diagonal_sums": "sums of diagonals",
    "relative_gradients": "relative bias gradients",
    "sink_gradients": "sink gradients",
    "append_keys": "append",
    "append_and_rotate": "update",
    "schedule_varlen_tiles": "schedule",
    "transpose_v": "transpose",
    "key_hulls": "row hulls",
    "query_hulls": "key hulls",
    "seen_lists": "seen",
    "list_visits": "visits",
    "part_rows": "parts",
    "cut_rows": "cut rows",
    "cut_hulls": "cut hulls",
}
# Leaves of groups that are not called as their operand is.
_OPERANDS = {
    "o": "out",
    "alibi": "alibi_slopes",
    "relative": "rel_bias",
    "tree": "tree_mask",
    "table": "block_table",
    "batch_idx": "kv_batch_idx",
    "cos": "rotary_cos",
    "sin": "rotary_sin",
    "partials": "partial_out",
    "counts": "v_t_counts",
    "cu_q": "cu_seqlens_q",
    "cu_k": "cu_seqlens_k",
    "used_q": "seqused_q",
    "used_k": "seqused_k",
}
# Groups that are not called as their first operand is.
_GROUPS = {"rotary": "rotary_cos", "tree": "tree_mask", "blocks": "block_rows"}
# Rows of these are query rows.
_OF_QUERIES = {"q", "out", "lse", "dout", "dq", "dlse", "rotated", "partial_out"}
_FAR = 0x7FFF0000


@dataclass
class Place:
    """Where an operand lies: its address and its strides in elements, by axis. map: as TMA sees
    it, if it does. promise: what the compiler was told that the address is a multiple of."""

    address: int
    strides: dict[str, int] = field(default_factory=dict)
    map: Map | None = None
    promise: int = 1


def role(launch: Launch) -> str:
    """What the launched kernel does."""
    return _ROLES[launch.kernel.function]


def roles(launches: Iterable[Launch]) -> list[str]:
    """What the launched kernels do, in order."""
    return [role(launch) for launch in launches]


def the(launches: Iterable[Launch], wanted: str) -> Launch:
    """The one launch with this role."""
    found = [launch for launch in launches if role(launch) == wanted]
    assert len(found) == 1, f"{len(found)} launches of {wanted}"
    return found[0]


def places(launch: Launch) -> dict[str, Place]:
    """Every operand in memory that the kernel was given, by Operands' names and those of results
    and scratch."""
    found: dict[str, Place] = {}
    for parameter in launch.memory:
        if parameter.startswith("scratch["):
            continue
        name, value = _operand(parameter), launch.arguments[parameter]
        if isinstance(value, Map):
            if parameter == "io.v" and launch.constants.get("params.tile.V_TRANSPOSED"):
                name = "v_t map"
            found[name] = Place(value.address, _map_strides(value), value)
            _same_numbers(launch, parameter, value)
        else:
            assert value is not None, f"{parameter}: no tensor map was put in place"
            found[name] = Place(value, promise=launch.promises.get(parameter, 1))
    for parameter, value in launch.arguments.items():
        if parameter.split(".")[-1].startswith("stride_"):
            name, axis = _stride(parameter)
            if name not in found:
                # A group whose array has a name of its own.
                group = parameter.rpartition(".")[0]
                own = [p for p in launch.arguments if p.rpartition(".")[0] == group]
                name = next(_operand(p) for p in own if p in launch.memory)
            found[name].strides[axis] = value
    return found


def _operand(parameter: str) -> str:
    """The operand of an address: io.q.ptr, descales.k.shift, mods.alibi."""
    *groups, leaf = parameter.split(".")
    if "descales" in groups:
        return f"{groups[-1]}_{'descale' if leaf == 'ptr' else leaf}"
    if leaf == "ptr":
        return _GROUPS.get(groups[-1], groups[-1])
    return _OPERANDS.get(leaf, leaf)


def number(launch: Launch, name: str) -> Any:
    """A number that the kernel was given: scale, softcap, heads_q, heads_k, shift, bottom_right,
    left, right (-1 is unbounded), and any other by the parameter's name. None if it is absent."""
    given: dict[str, Any] = {}
    for parameter, value in {**launch.constants, **launch.arguments}.items():
        given.setdefault(parameter.split(".")[-1], value)
    if name in ("left", "right"):
        return -1 if given[name] in (-1, 1 << 29) else given[name]
    if name in ("scale", "softcap") and "scale_log2" in given:
        return _from_log2(given)[name]
    if name in ("heads_q", "heads_k") and name not in given:
        heads = given.get("heads_q", given.get("heads"))
        return heads if name == "heads_q" else heads // given["group"]
    return given[name]


def _from_log2(given: dict) -> dict[str, float]:
    log2e = math.log2(math.e)
    if not given.get("softcap_scale"):
        return {"scale": given["scale_log2"] / log2e, "softcap": 0.0}
    softcap = given["scale_log2"] / log2e
    return {"scale": given["softcap_scale"] * softcap / (2 * log2e), "softcap": softcap}


def _stride(parameter: str) -> tuple[str, str]:
    """The operand and axis of a stride: io.q.stride_n, mods.stride_alibib."""
    *groups, name = parameter.split(".")
    name = name.removeprefix("stride_")
    if len(name) > 1:
        return _OPERANDS.get(name[:-1], name[:-1]), name[-1]
    operand = _operand(".".join((*groups, "ptr")))
    return operand, "m" if name == "n" and operand in _OF_QUERIES else name


def _map_strides(value: Map) -> dict[str, int]:
    """Strides by axis of (batch, head, row, dim), of (batch, head, row, group, dim), whose heads
    are apart by the group's, and of rows alone (`hopper_maps.packed_map`)."""
    if value.shape[0] == _FAR:
        return {"h": value.strides[2], "r": value.strides[3]}
    if len(value.shape) == 5:
        return {"b": value.strides[0], "h": value.strides[3], "r": value.strides[2]}
    return dict(zip("bhr", value.strides, strict=False))


def _same_numbers(launch: Launch, parameter: str, value: Map) -> None:
    """AssertionError unless the shape and strides beside a map are the map's own."""
    for part in ("shape", "strides"):
        for axis, number in enumerate(getattr(value, part)):
            assert launch.arguments[f"{parameter}.{part}[{axis}]"] == number, (parameter, part)


def described(launch: Launch) -> list[str]:
    """A launch in words that do not depend on addresses or on the order of anything."""
    queued = " programmatic" * launch.programmatic + " cooperative" * launch.cooperative
    queued += f" cluster={launch.cluster}" * (launch.cluster > 1)
    lines = [f"  {role(launch)} {launch.grid} {_words(launch.options)}{queued}"]
    for name, place in sorted(places(launch).items()):
        promised = "*16" if place.promise == 16 else ""
        view = ""
        if place.map is not None:
            view = f" map {place.map.shape} {place.map.strides} box {place.map.box}"
        lines.append(f"    {name}{promised} {_words(place.strides)}{view}")
    beside = [name for name in launch.arguments if "[" not in name and name not in launch.memory]
    numbers = {name: launch.arguments[name] for name in beside if "stride_" not in name}
    promised = {n: p for n, p in launch.promises.items() if p > 1 and n not in launch.memory}
    wide = sorted(name for name in beside if launch.types[name] == "i64")
    lines.append(f"    numbers {_words(numbers)}")
    lines.append(f"    64 bits {' '.join(wide)}")
    lines.append(f"    multiples {_words(promised)}")
    lines.append(
        f"    constants {_words({k: v for k, v in launch.constants.items() if v is not None})}"
    )
    return lines


def _words(facts: dict) -> str:
    return " ".join(
        f"{name}={value:.7g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in sorted(facts.items())
    )
