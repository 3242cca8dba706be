"""Load on one server: client, prompts, closed and open loops, and the two commands made of them.

Why not a load generator off the shelf: `vllm bench serve` comes with vLLM alone, guidellm (0.8) needs torch
and transformers, aiperf (0.13) pins some forty packages, Kubernetes' clients among them, and pandas and rich
to versions of its own. None sends the official latency body to ``/invocations`` as published, asks sums while
the load runs, or counts the smaller of what the server claims and what the tokenizer finds; and they could
not visit several servers in turns. What they have beyond that, arrivals at a rate and goodput, is little code
(`arrivals`, `goodput`) under their names.
"""
