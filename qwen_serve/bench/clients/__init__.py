"""`qwen-bench conformance clients`: whether common clients work with a server."""
