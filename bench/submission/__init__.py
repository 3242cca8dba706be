"""Hand an image in: its rules checked, then uploaded and submitted."""
