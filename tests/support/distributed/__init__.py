"""What ranks of a group do in tests of `heedful.distributed`: batches, decodes, training."""
