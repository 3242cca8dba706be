"""Recipes: the files of quant_recipes/, and errors for invalid files."""

from pathlib import Path

import pytest

from qwen_serve.convert.recipes import RECIPES, RecipeError, known_recipes, load_recipe

LEVELS = [
    "Q8_0",
    "Q6_K",
    "Q5_K_M",
    "Q5_K_S",
    "Q4_K_M",
    "Q4_K_S",
    "IQ4_XS",
    "Q3_K_L",
    "Q3_K_M",
    "Q3_K_S",
    "Q2_K",
]


def test_every_level_has_a_recipe_of_its_llama_cpp_type() -> None:
    assert sorted(known_recipes()) == sorted(LEVELS)
    for level in LEVELS:
        recipe = load_recipe(level)
        assert recipe.type == level
        assert recipe.file_type.name == f"MOSTLY_{level}"
        assert recipe.layers == ()


def test_known_recipes_run_from_most_to_fewest_bits() -> None:
    bits = [load_recipe(level).bits_per_weight for level in known_recipes()]
    assert bits == sorted(bits, reverse=True)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    recipe = load_recipe(
        _write(
            tmp_path,
            """
            type = "Q4_K_S"
            about = "mine"
            [[override]]
            pattern = 'blk\\.[01]\\.ffn_down'
            type = "Q6_K"
            reason = "the first blocks matter"
            [layers]
            prune = [7, 4, 5, 6]
            """,
        )
    )
    assert [(pattern, kind.name) for pattern, kind in recipe.overrides] == [("blk\\.[01]\\.ffn_down", "Q6_K")]
    assert recipe.layers == (4, 5, 6, 7)
    assert recipe.uses_imatrix


def test_the_fingerprint_follows_what_decides_the_output_and_not_the_prose(tmp_path: Path) -> None:
    def fingerprint(**changes: str) -> str:
        values = {"type": "Q6_K", "about": "a", "pattern": "ffn_up", "to": "Q8_0", "reason": "b"} | changes
        text = """
            type = "{type}"
            about = "{about}"
            [[override]]
            pattern = "{pattern}"
            type = "{to}"
            reason = "{reason}"
            """
        return load_recipe(_write(tmp_path, text.format(**values))).fingerprint

    assert fingerprint(about="other", reason="words") == fingerprint()
    assert (
        len({fingerprint(), fingerprint(type="Q5_K_M"), fingerprint(pattern="x"), fingerprint(to="F16")}) == 4
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('about = "a"', "type: missing"),
        ('type = "Q9_K"\nabout = "a"', "type: 'Q9_K' is not a quantized file type; allowed are Q4_0, "),
        ('type = "F16"\nabout = "a"', "type: 'F16' is not a quantized file type"),
        ('type = 15\nabout = "a"', "type: Input should be a valid string"),
        (
            'type = "Q6_K"\nabout = "a"\nbits = 4',
            "bits: unknown key; allowed are type, about, imatrix, pure, output",
        ),
        ('type = "Q6_K"\nabout = "a"\n[layers]\ndrop = [1]', "layers.drop: unknown key; allowed are prune"),
        ('type = "Q6_K"\nabout = "a"\n[vocab]\nsize = 1', "vocab.size: unknown key; allowed are keep"),
        ('type = "Q6_K"\nabout = "a"\n[vocab]\nkeep = 0', "vocab.keep: Input should be greater than"),
        (
            'type = "Q6_K"\nabout = "a"\n[layers]\nprune = [-1]',
            "layers.prune.0: Input should be greater than or equal",
        ),
        (
            'type = "Q6_K"\nabout = "a"\n[[override]]\npattern = "x"\ntype = "Q8_0"',
            "override.0.reason: missing",
        ),
        (
            'type = "Q6_K"\nabout = "a"\n[[override]]\npattern = "x"\ntype = "Q4_K_M"\nreason = "r"',
            "override.0.type: 'Q4_K_M' is not a tensor type; allowed are F32, F16, ",
        ),
        (
            'type = "Q6_K"\nabout = "a"\n[[override]]\npattern = "blk.("\ntype = "Q8_0"\nreason = "r"',
            "override.0.pattern: 'blk.(' is not a regular expression",
        ),
        ("type = Q6_K", "not a TOML file"),
    ],
)
def test_errors_name_the_file_the_key_and_what_is_allowed(tmp_path: Path, text: str, complaint: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_all_errors_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(_write(tmp_path, 'type = "Q9"\nsize = 1'))
    assert len(str(caught.value).splitlines()) == 3


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"Q4_K_M") as caught:
        load_recipe("Q4_K_XXL")
    assert str(RECIPES) in str(caught.value)


def _write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path
