"""Load on one server: client, prompts, closed and open loops, and the two commands made of them.

Why not an existing load generator: `vllm bench serve` needs vLLM, guidellm (0.8) torch
and transformers, and aiperf (0.13) pins some forty packages, among them pandas and rich. None sends the
official latency body to ``/invocations``, asks sums while the load runs, counts the smaller of the server's
and the tokenizer's token count, or measures several servers in turns. Their further features, arrivals at a
rate and goodput, are little code (`arrivals`, `goodput`) and have their names here.
"""
