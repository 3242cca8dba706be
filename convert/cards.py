"""What decides decode time on a card: bytes a second that its memory is read at, by published datasheets."""

BANDWIDTH = {"A10G": 600e9, "L4": 300e9, "H100": 3350e9, "H200": 4800e9}
