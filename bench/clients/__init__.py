"""Whether the clients people use work with a server: `qwen-bench conformance clients`."""
