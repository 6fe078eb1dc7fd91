"""Gradients of queries, keys, values, bias and sinks. May import `portable.shared`."""
