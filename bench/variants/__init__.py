"""Variants of one model, measured alike: a quant level or recipe, server settings, and a name.

``variant`` reads the files, ``plan`` holds what is the same for all, ``weights`` has the GGUFs made,
``measure`` puts one variant through a server of its own, ``result`` is what it leaves behind, ``standing``
ranks them, and ``tables``, ``pictures`` and ``page`` show them.
"""
