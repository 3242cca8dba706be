"""Convert, quantize and serve Qwen3.5 on one GPU with llama.cpp."""
