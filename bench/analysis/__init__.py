"""What figures mean: statistics of measurements, and the model of what a card could do."""
