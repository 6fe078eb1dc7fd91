"""The machine that runs blocks: waves, registers, LDS, memory. May import all of `emulator`."""
