"""Runs heedful in place of PyTorch's attention: for `F.scaled_dot_product_attention` within a
`with` block (`sdpa`), or for torch's operators in the whole process (`activate`, `restore`).
Nothing is replaced on import.
"""

from heedful.integrations.torch.functional import sdpa
from heedful.integrations.torch.registry import activate, is_active, restore
from heedful.integrations.torch.report import Report

__all__ = ["Report", "activate", "is_active", "restore", "sdpa"]
