"""Updates a KV cache before attention. Imports nothing else of `portable`."""
