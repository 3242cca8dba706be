"""Measures variants of a model: a quant or recipe, server settings, and a name.

``variant`` reads the files, ``plan`` has the common settings, ``weights`` makes the GGUFs, ``stages``
measures one variant on a server of its own, ``sweep`` is the command, and ``standing`` ranks the results.
"""
