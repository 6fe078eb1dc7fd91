"""Calls that run at once: how they are recognised, and launched. May import `torch.operands` and
`torch.base`."""
