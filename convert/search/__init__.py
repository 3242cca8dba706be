"""A recipe that is searched: which type for which tensor, by what each was measured to cost.

groups.py   the tensors that a recipe decides, in groups by role and depth, and the types there are
measure.py  the divergence of a model some of whose tensors are lowered, without writing a file
record.py   what was measured so far, on disk after every probe
law.py      the additive model: what a tensor costs at a type
solve.py    the types of least cost under limits, exactly
search.py   the way through these
write.py    the result as a recipe file
"""

from qwen_serve.convert.search.record import is_record
from qwen_serve.convert.search.search import SEARCH_VERSION, Found, Paths, check_reach, search
from qwen_serve.convert.search.target import Target
from qwen_serve.convert.search.write import as_recipe, evidence_of, print_found, write_recipe

__all__ = [
    "SEARCH_VERSION",
    "Found",
    "Paths",
    "Target",
    "as_recipe",
    "check_reach",
    "evidence_of",
    "is_record",
    "print_found",
    "search",
    "write_recipe",
]
