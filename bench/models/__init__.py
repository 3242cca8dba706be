"""Models and checkpoints that are made up for measuring, and how fast a real one is converted."""
