"""Series of measurements. ``qwen-bench experiment NAME`` runs the TOML file of that name."""
