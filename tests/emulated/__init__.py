"""Tests of the emulator and of the inspector, and AMD machine code executed."""
