"""Faults that silicon hides: races, undefined values, missing wait states. May import all of
`emulator`."""
