"""Assembly text as instructions, and these as executable blocks. May import `emulator.semantics`
and `emulator.checks`."""
