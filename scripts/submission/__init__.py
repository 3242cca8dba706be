"""Checks an image against the competition's rules, uploads it and submits it."""
