"""Variant files: valid keys and values, and errors."""

from pathlib import Path

import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.variants.variant import check_distinct, of_quants, read_setting, read_variant
from qwen_serve.server.variant import Variant, known_variants


def written(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_quants_are_variants_with_default_settings() -> None:
    assert of_quants(["q8_0", " Q4_K_M", "", "Q8_0"]) == [
        Variant(name="Q8_0", quant="Q8_0"),
        Variant(name="Q4_K_M", quant="Q4_K_M"),
    ]


def test_names_in_any_case_are_levels(tmp_path: Path) -> None:
    assert [one.quant for one in of_quants(["Q4_K_M", "iq4_xs", "bf16"])] == ["Q4_K_M", "IQ4_XS", "BF16"]
    assert read_variant(written(tmp_path, 'quant = "q4_K_m"\n')).level == "Q4_K_M"


def test_a_file_with_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'name = "small-kv"\nabout = "x"\nquant = "q4_k_m"\n[settings]\ncache_type_k = "q8_0"\nparallel = 4\n',
    )
    variant = read_variant(path)
    assert (variant.name, variant.quant, variant.level) == ("small-kv", "Q4_K_M", "Q4_K_M")
    assert variant.settings == {"cache_type_k": "q8_0", "parallel": 4}
    assert variant.with_settings({"parallel": 2, "threads": 1}).settings == {
        "parallel": 4,
        "threads": 1,
        "cache_type_k": "q8_0",
    }


def test_a_recipe_lies_beside_the_file_and_names_the_weights(tmp_path: Path) -> None:
    written(tmp_path, 'type = "Q4_K_M"\nabout = "plain"\n', "plain4.toml")
    variant = read_variant(written(tmp_path, 'recipe = "plain4.toml"\n'))
    assert (variant.name, variant.level) == ("mine", "plain4")
    assert variant.recipe == tmp_path / "plain4.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('quant = "Q9"', "unknown quant 'Q9'; known are F16, BF16, F32, Q8_0"),
        ('recipe = "gone.toml"', "gone.toml: no such recipe"),
        ('quant = "Q8_0"\n[settings]\nparallel = 0', "Input should be greater than or equal to 1"),
    ],
)
def test_mistakes_name_the_file_and_the_key(tmp_path: Path, text: str, said: str) -> None:
    """Mistakes that the server finds, too, are tested there."""
    path = written(tmp_path, text)
    with pytest.raises(BenchError) as caught:
        read_variant(path)
    assert path in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("name", known_variants())
def test_those_that_come_along_are_levels_of_the_converter(name: str) -> None:
    variant = read_variant(name)
    assert variant.name == name and variant.level == variant.quant


def test_unknown_quant_names_the_known_ones() -> None:
    with pytest.raises(BenchError, match=r"--quants: unknown quant 'q5'; known are F16.*Q2_K"):
        of_quants(["Q8_0", "q5"])


def test_names_and_weights_must_differ(tmp_path: Path) -> None:
    one = Variant(name="a", quant="Q8_0")
    with pytest.raises(BenchError, match="two variants are named"):
        check_distinct([one, Variant(name="A", quant="Q4_K_M")])
    with pytest.raises(BenchError, match="the weights of both would be called"):
        check_distinct([one, Variant(name="b", recipe=tmp_path / "Q8_0.toml")])
    check_distinct([one, Variant(name="b", quant="Q8_0", settings={"parallel": 2})])


def test_settings_on_the_command_line() -> None:
    assert read_setting("cache-type-k=q8_0") == ("cache_type_k", "q8_0")
    assert read_setting("parallel=4") == ("parallel", 4)
    assert read_setting("mlock=true") == ("mlock", True)
    for text in ("parallel", "=4", "a=[1]"):
        with pytest.raises(ValueError, match="want"):
            read_setting(text)
