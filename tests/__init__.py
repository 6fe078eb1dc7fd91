"""Tests by what they need: nothing, a CPU, a compiler, the emulator, a GPU. What they share is in
`support`."""
