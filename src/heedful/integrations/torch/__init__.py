"""PyTorch's own attention by heedful: `F.scaled_dot_product_attention` for a scope (`sdpa`), or
torch's operators of it for the process (`activate`, `restore`). Nothing is replaced on import.
"""

from heedful.integrations.torch.functional import sdpa
from heedful.integrations.torch.registry import activate, is_active, restore
from heedful.integrations.torch.report import Report

__all__ = ["Report", "activate", "is_active", "restore", "sdpa"]
