"""Attention over several devices: each computes its batch entries and heads. Under shard_map the
caller says which these are. Under jit with sharded inputs a partitioning rule does: batch and KV
heads may be spread, other dims are gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

# Labels of dims that may be spread: batch, KV heads, and query heads by their KV head.
BATCH, HEADS, GROUPED = "b", "g", "(g r)"
# Operands with a dim for the batch alone.
_LENGTHS = ("seqused_q", "seqused_k", "leftpad_k", "q_offsets", "kv_batch_idx", "cache_seqlens")
_LENGTHS += ("seqused",)
# Those of them that packed sequences have, too.
_OF_PACKED = ("seqused_q", "seqused_k", "q_offsets")
# Operands and results with dims for batch, query heads, rows and keys, or lists of rows.
_OF_SCORES = ("bias", "probs", "dbias", "block_rows", "block_keys")
_SCALES = ("q_descale", "k_descale", "v_descale", "k_shift", "v_shift")


def varies_over(array: Any) -> frozenset[str]:
    """The manual mesh axes, those of shard_map, over which an array or its type varies."""
    kind = array if hasattr(array, "manual_axis_type") else jax.typeof(array)
    return getattr(kind.manual_axis_type, "varying", frozenset())


def alike(tree: Any) -> Any:
    """The arrays, made to vary over all axes over which any of them varies, as a primitive
    requires."""
    axes = frozenset().union(*map(varies_over, jax.tree.leaves(tree)))
    if not axes:
        return tree

    def varied(array):
        missing = tuple(axes - varies_over(array))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(varied, tree)


def varying_like(made: Any, types) -> Any:
    """The type of a result as varying over manual mesh axes as those of the operands do."""
    widest = max(types, key=lambda kind: len(varies_over(kind)))
    if not varies_over(widest):
        return made
    sharding = NamedSharding(widest.sharding.mesh, PartitionSpec())
    return made.update(sharding=sharding, manual_axis_type=widest.manual_axis_type)


def unvaried(context: Any) -> Any:
    """A lowering context whose operands vary over no axis, for one device's part."""
    plain = [ShapedArray(a.shape, a.dtype) for a in context.avals_in]
    results = [ShapedArray(a.shape, a.dtype) for a in context.avals_out]
    return context.replace(avals_in=plain, avals_out=results)


def on_one_device():
    """A context for what one device computes: no mesh, whatever is set around the program."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def is_spread(context: Any) -> bool:
    """Whether the lowered program is for several devices, among which XLA divides the work."""
    axes = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return set(axes.manual_axes) != set(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 1) > 1


@dataclass(frozen=True)
class Layout:
    """How the dims of a call's arrays belong together.

    dense: q is (batch, rows, heads, dim), not packed. shared: keys are not one row of storage a
    batch entry. group: query heads a KV head.
    """

    dense: bool
    shared: bool
    heads_k: int
    group: int

    @property
    def query_heads(self) -> str:
        return GROUPED if self.group > 1 else HEADS

    def labels(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """A label for each dim; "" for one that may not be spread."""
        letters = self._labels(name, len(shape))
        whole = {HEADS: self.heads_k, GROUPED: self.heads_k * self.group}
        # A dim of 1 is repeated, and stays where it is.
        labels = []
        for label, n in zip(letters, shape, strict=True):
            fits = n == whole[label] if label in (HEADS, GROUPED) else n > 1
            labels.append(label if fits else "")
        return labels

    def _labels(self, name: str, rank: int) -> list[str]:
        heads, batch = self.query_heads, BATCH if self.dense else ""
        keys = batch if not self.shared else ""
        if name in ("q", "out", "dout", "dq", "rotated"):
            return [batch, "", heads, ""][-rank:] if self.dense else ["", heads, ""]
        if name in ("k_new", "v_new"):
            return [BATCH, "", HEADS, ""]
        if name in ("k", "v", "dk", "dv"):
            return [keys, "", HEADS, ""] if rank == 4 else ["", HEADS, ""]
        if name in ("lse", "dlse"):
            return [batch, heads, ""] if rank == 3 else [heads, ""]
        if name in _OF_SCORES or (name == "key_ranges" and rank == 4):
            return [BATCH, heads, "", ""]
        if name in ("alibi_slopes", "sink", "dsink", "head_index"):
            return [BATCH, heads][-rank:]
        if name in ("rel_bias", "drel_bias"):
            return [heads, ""]
        if name in _LENGTHS or name == "batch_index":
            return [BATCH if self.dense or name not in _OF_PACKED else ""]
        if name in _SCALES:
            if rank > 2:
                return [*[keys, "", HEADS, ""][-rank:]]
            return [BATCH if self.dense else "", HEADS][2 - rank :]
        if name in ("block_table", "tree_mask", "origins"):
            return [BATCH if self.dense else "", *[""] * (rank - 1)]
        return [""] * rank


@dataclass(frozen=True)
class Rule:
    """The sharding rule that XLA gets for a call over several devices.

    names, shapes: of its arrays; results: likewise. layout: see above. run: computes the results of
    arrays by name. whole: labels that may not be spread.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    layout: Layout
    run: Callable[[dict[str, Array]], list[Array]]
    whole: tuple[str, ...] = ()

    def spread(self) -> Callable[..., list[Array]]:
        """The computation as XLA may share it among devices."""

        def computed(*arrays):
            return tuple(self.run(dict(zip(self.names, arrays, strict=True))))

        fun = custom_partitioning(computed)
        text, sizes, alone = self._text()
        fun.def_partition(
            partition=self._partition,
            infer_sharding_from_operands=self._infer,
            sharding_rule=text,
            need_replication_factors=alone,
            **sizes,
        )
        return fun

    def _text(self) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        """The rule as Shardy reads it, sizes of compound factors, and factors that stay whole."""
        # In the order in which they appear, as Shardy wants them.
        fresh, alone = iter(range(10**6)), {}

        def words(name, shape):
            labels = []
            for label in self.layout.labels(name, shape):
                if not label or label in self.whole:
                    label = f"w{next(fresh)}"
                    alone[label] = None
                elif label == GROUPED:
                    alone["r"] = None
                labels.append(label)
            return " ".join(labels)

        inputs = ", ".join(map(words, self.names, self.shapes))
        made = ", ".join(words(*result) for result in self.results)
        # KV heads have a whole dim of their own, that of k, which tells their number.
        sizes = {"r": self.layout.group} if "r" in alone else {}
        return f"{inputs} -> {made}", sizes, tuple(alone)

    def _axes(self, arg_shapes) -> dict[str, Any]:
        """Mesh axes by label, from how q lies, as far as they divide what they spread."""
        index = self.names.index("q" if "q" in self.names else "k_new")
        placed, mesh = arg_shapes[index], arg_shapes[index].sharding.mesh
        spec = (*placed.sharding.spec, *[None] * len(placed.shape))[: len(placed.shape)]
        by_label: dict[str, Any] = {}
        for label, axes in zip(
            self.layout.labels(self.names[index], placed.shape), spec, strict=True
        ):
            if not label or label in self.whole or axes is None:
                continue
            names = axes if isinstance(axes, tuple) else (axes,)
            count = 1
            for name in names:
                count *= mesh.shape[name]
            if label == BATCH or self.layout.heads_k % count == 0:
                by_label[BATCH if label == BATCH else HEADS] = names
        return by_label

    def _sharding(self, mesh, axes: dict[str, Any], name: str, shape) -> NamedSharding:
        labels = self.layout.labels(name, shape)
        keys = [HEADS if label == GROUPED else label for label in labels]
        return NamedSharding(mesh, PartitionSpec(*(axes.get(key) for key in keys)))

    def _infer(self, mesh, arg_shapes, result_shapes):
        axes = self._axes(arg_shapes)
        return tuple(self._sharding(mesh, axes, *result) for result in self.results)

    def _partition(self, mesh, arg_shapes, result_shapes):
        axes = self._axes(arg_shapes)
        inputs = tuple(map(lambda n, s: self._sharding(mesh, axes, n, s), self.names, self.shapes))

        def part(*arrays):
            with on_one_device():
                made = self.run(dict(zip(self.names, arrays, strict=True)))
            pairs = zip(self.results, made, strict=True)
            return tuple(self._summed(n, s, a, axes) for (n, s), a in pairs)

        return mesh, part, self._infer(mesh, arg_shapes, result_shapes), inputs

    def _summed(self, name: str, shape, array: Array, axes: dict[str, Any]) -> Array:
        """Sums gradients of replicated arrays over the devices."""
        if name not in ("dbias", "dsink", "drel_bias"):
            return array
        labels = self.layout.labels(name, shape)
        has = {HEADS if label == GROUPED else label for label in labels}
        for key, names in axes.items():
            if key not in has:
                array = jax.lax.psum(array, names)
        return array


def places(batch: int, heads: int) -> dict[str, Array]:
    """Arrays that tell a device which batch entries and heads it has, once they are spread."""
    return {
        "batch_index": jnp.arange(batch, dtype=jnp.uint32),
        "head_index": jnp.arange(heads, dtype=jnp.uint32),
    }


def shifted(by_name: dict[str, Array]) -> dict[str, Array]:
    """The dropout origin of a device's part, or those of its sequences, by name. by_name: those of
    the whole, and those of `places`, which are taken out."""
    batch, head = by_name.pop("batch_index"), by_name.pop("head_index")
    zero = jnp.zeros(1, jnp.uint32)
    batch, head = (index[:1] if index.size else zero for index in (batch, head))
    if "origins" in by_name:
        more = jnp.concatenate([zero, head, zero, zero]).astype(jnp.int32)
        return {"origins": by_name["origins"] + more[None]}
    return {"origin": by_name["origin"] + jnp.concatenate([batch, head, zero, zero])}
