"""`qwen-bench conformance clients`: whether clients that people use work with a server."""
