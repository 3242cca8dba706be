"""The quality gates: their items, requests to a chat server, and the scoring of answers.

``gate`` defines a gate, ``tasks`` builds lm-eval's tasks for it, and ``chat_model`` connects lm-eval to a
server. ``estimate`` computes a score with an interval. ``nano`` has the gates on the bundled model's held-out
items and their recorded outcomes. ``runner`` runs one gate, ``measure`` several, and ``score`` and
``samples`` are the results in the store. ``quality``, ``paired`` and ``perplexity`` are commands.
"""
