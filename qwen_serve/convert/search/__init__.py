"""Searches a recipe: a type for each tensor, by measured cost.

groups.py   the tensors that a recipe decides, in groups by role and depth, and their possible types
measure.py  the divergence of a model with some tensors lowered, without writing a file
record.py   the measurements so far, on disk after every probe
law.py      the additive model: what a tensor costs at a type
solve.py    the types of least cost under limits, exactly
search.py   the search itself
transfer.py types for a larger model of the family, from a smaller one's probes
write.py    the result as a recipe file
"""

from qwen_serve.convert.search.record import is_record
from qwen_serve.convert.search.search import SEARCH_VERSION, Found, Paths, check_reach, search
from qwen_serve.convert.search.target import Target
from qwen_serve.convert.search.write import as_recipe, evidence_of, print_found, with_results, write_recipe
