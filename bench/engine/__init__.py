"""The engine without a server: what single operations of its llama.cpp contexts cost on this machine."""
