"""What developers run, beside `make`. May import all of `heedful`."""
