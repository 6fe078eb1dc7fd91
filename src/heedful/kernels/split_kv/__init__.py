"""Device code of kernels whose programs share the keys of a call: how the keys are dealt out, how a
program walks over its share, which new rows it appends, and how results leave. What is shared is
arithmetic: functions take tensors of indices in any layout."""
