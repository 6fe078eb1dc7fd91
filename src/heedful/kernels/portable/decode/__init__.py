"""Few queries over many keys. May import `portable.cache`."""
