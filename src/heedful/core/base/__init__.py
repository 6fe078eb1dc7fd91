"""What the rest of `core` stands on: settings, numbers and symbols, arrays, devices, forks.
Imports nothing else of the package."""
