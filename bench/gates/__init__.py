"""The quality gates: what is asked, how a chat server answers it, and what the answers are worth.

``gate`` says what a gate is, ``tasks`` builds lm-eval's tasks for it, ``chat_model`` lets lm-eval talk to a
server, ``estimate`` turns right and wrong into a score with an interval, ``nano`` knows the bundled model's
held-out items and recorded answers, ``runner`` puts one gate through a server, ``measure`` all of them, and
``score`` and ``samples`` are what they leave in the store. ``quality``, ``paired`` and
``perplexity`` are commands.
"""
