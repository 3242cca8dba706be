"""Statistics of measurements, and a model of what a card could do."""
