"""``qwen-bench record``: an hour on one card as one file, which its owner may send in."""
