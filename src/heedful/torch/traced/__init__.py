"""Calls through torch's dispatcher: operators, their derivatives, vmap, DTensors. May import
`torch.eager`, `torch.operands` and `torch.base`."""
