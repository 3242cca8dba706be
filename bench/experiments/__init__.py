"""Series of measurements: each a TOML file here, run by ``qwen-bench experiment NAME``."""
