"""``qwen-bench record``: measurements of an hour on one GPU, in one file that the user may send in."""
