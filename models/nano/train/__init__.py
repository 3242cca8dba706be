"""How the bundled nano checkpoint is made: data generators, model, training, evaluation.

`python -m models.nano.train --help` from the repository's root lists the verbs.
"""
