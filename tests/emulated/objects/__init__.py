"""Code objects: the reader, arguments by name, the command line."""
