"""Context parallelism in JAX: one batch whose tokens lie on the devices of a mesh axis, under
`shard_map`. May import `heedful.jax.api`, `heedful.jax.base`, `heedful.jax.operands` and
`heedful.jax.traced`.
"""

from heedful.jax.distributed.attention import STRATEGIES, attention
from heedful.jax.distributed.layouts import LAYOUTS, positions, shard, unshard

__all__ = ["LAYOUTS", "STRATEGIES", "attention", "positions", "shard", "unshard"]
