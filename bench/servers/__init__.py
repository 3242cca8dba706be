"""Other programs: starts servers, builds llama.cpp's, reads their counters, and compares them in turns."""
