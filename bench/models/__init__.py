"""Models that are made up for measuring."""
