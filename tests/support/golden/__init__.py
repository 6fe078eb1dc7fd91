"""What golden tables and tables of messages are made of."""
