"""Context parallelism: one batch of documents over the ranks of a process group.

`plan` decides once a batch which tokens each rank holds, and what ranks send each other;
`attention` is `flash_attn_varlen_func` of the whole batch, called by each rank on its own tokens.

`layouts`, `schedules` and `rings` are arithmetic on lengths and need no processes; `exchange` moves
rows between ranks; `gather`, `heads` and `ring` are the strategies, `calls` what they call;
`traced` and `shards` are for compiled code and DTensors. `decode` needs no plan. May import the
public calls of `heedful.torch`, `core` and torch.
"""

from heedful.distributed.attention import attention
from heedful.distributed.decode import attention_with_kvcache
from heedful.distributed.plan import ContextPlan, plan

__all__ = ["ContextPlan", "attention", "attention_with_kvcache", "plan"]
