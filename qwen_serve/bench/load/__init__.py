"""Load on one server: client, prompts, closed and open loops, and the commands latency and throughput.

No existing load generator fits. `vllm bench serve` needs vLLM, guidellm (0.8) needs torch and transformers,
and aiperf (0.13) pins some forty packages, among them pandas and rich. None of them sends the official
latency body to ``/invocations``, checks answers under load, verifies the server's token count with a
tokenizer, or measures several servers in turns. Poisson arrivals (`arrivals`) and goodput (`goodput`) are
named as they are there.
"""
