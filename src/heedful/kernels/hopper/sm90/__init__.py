"""Parts that all Hopper kernels share: products, barriers, rings of tiles, work tiles, masks,
softmax."""
