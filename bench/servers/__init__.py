"""Other programs: starting servers, building llama.cpp's, what they count, and comparing them in turns."""
