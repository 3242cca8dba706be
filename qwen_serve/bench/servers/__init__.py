"""Starts servers, builds llama.cpp's programs, reads servers' counters, and compares servers in turns."""
