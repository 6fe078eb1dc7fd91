"""Tests of `heedful.distributed` on as many GPUs as there are."""
