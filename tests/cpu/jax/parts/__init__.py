"""Parts of JAX's calls by themselves: what no whole call is needed for."""
