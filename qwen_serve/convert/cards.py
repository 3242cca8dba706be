"""Memory bandwidth of GPUs in bytes a second, by published datasheets; it bounds decode time."""

BANDWIDTH = {"A10G": 600e9, "L4": 300e9, "H100": 3350e9, "H200": 4800e9}
