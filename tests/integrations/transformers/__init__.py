"""`heedful.integrations.transformers`: tiny models of transformers with heedful beside the same
models with eager attention. Skipped where transformers is not installed."""
