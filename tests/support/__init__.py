"""What tests share. May import all of the package."""
