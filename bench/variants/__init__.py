"""Variants of one model, measured alike: a quant level or recipe, server settings, and a name.

``variant`` reads the files, ``plan`` holds what is the same for all, ``weights`` has the GGUFs made,
``stages`` puts one variant through a server of its own, ``sweep`` is the command that goes from stage to
stage, and ``standing`` ranks what the store holds afterwards.
"""
