"""Parts that all Hopper kernels share: products, barriers, rings, work tiles, masks."""
