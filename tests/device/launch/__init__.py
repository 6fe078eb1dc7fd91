"""Tests of launches on a GPU: packs, pools, processes, devices."""
