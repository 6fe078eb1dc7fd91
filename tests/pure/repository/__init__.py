"""Rules of the repository: layers, sizes, words, documentation."""
