"""Problems of golden tables."""
