"""Statistics of measurements, and a performance model of GPUs."""
