"""The quality gates: the questions, how a chat server is asked, and how answers are scored.

``gate`` says what a gate is, ``tasks`` builds lm-eval's tasks for it, ``chat_model`` lets lm-eval talk to a
server, ``estimate`` computes a score with an interval, ``nano`` has the bundled model's
held-out items and recorded answers, ``runner`` asks one gate of a server, ``measure`` all of them, and
``score`` and ``samples`` are what they write to the store. ``quality``, ``paired`` and
``perplexity`` are commands.
"""
