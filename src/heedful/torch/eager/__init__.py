"""Calls that run at once: what is known of them, and how they are launched. May import
`torch.operands` and `torch.base`."""
