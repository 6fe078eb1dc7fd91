"""Calls that torch's dispatcher sees: operators, their derivatives, vmap, DTensors. May import
`torch.eager`, `torch.operands` and `torch.base`."""
