"""Other people's code objects on the emulator: how right they are, and what was found."""
