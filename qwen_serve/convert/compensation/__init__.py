"""Quantization with error compensation, onto the grids of llama.cpp's types.

grids.py     what the blocks of each type can hold
packing.py   blocks as bytes
scales.py    the search for scales and minima
rounding.py  codes, with each column's error carried into the next columns
gram.py      statistics of a matrix's inputs
file.py      the pass over a model's matrices
errors.py    what is left of each matrix's error, by kind of text, for the report
gains.py     how much compensation reduces the errors of types, for the search of recipes
arrays.py    numpy or torch
"""

from typing import Final

COMPENSATION_VERSION: Final = 3
"""Raise it when the same model and text would give different blocks."""
