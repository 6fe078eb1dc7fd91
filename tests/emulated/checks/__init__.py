"""Tests of what the emulator finds."""
