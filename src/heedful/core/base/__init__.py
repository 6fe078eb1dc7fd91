"""The base of the rest of `core`: settings, numbers and symbols, arrays, devices, forks. Imports
nothing else of the package."""
