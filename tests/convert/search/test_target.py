"""Targets: units, names, and invalid combinations."""

from pathlib import Path

import pytest

from qwen_serve.convert import cli
from qwen_serve.convert.search.target import Target, parse_size, spell_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("2.4GB", 2_400_000_000), ("4.0 mb", 4_000_000), ("1GiB", 2**30), ("900kB", 900_000), ("7b", 7)],
)
def test_sizes_have_a_number_and_a_unit(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["2.4", "GB", "2.4 GBit", "-1GB", "0MB", "1,5GB", "nan GB", ""])
def test_other_sizes_are_refused_with_what_would_be_right(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 2.4GB|more than nothing"):
        parse_size(text)


@pytest.mark.parametrize("n_bytes", [4_000_000, 4_661_664, 2_400_000_000, 999, 123_456])
def test_a_size_is_spelt_as_it_is_read(n_bytes: int) -> None:
    assert parse_size(spell_size(n_bytes)) == n_bytes


def test_labels_name_every_limit() -> None:
    assert Target(n_bytes=4_000_000).label == "auto-4.0MB"
    assert Target(bits_per_weight=4.5, divergence=0.01).label == "auto-4.5bpw-kld0.01"
    assert Target(milliseconds=4.5, card="A10G").label == "auto-4.5ms-A10G"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--quant", "auto"], "--quant auto wants a target: --target-size 2.4GB"),
        (["--quant", "auto", "--target-ms", "3"], "--target-ms wants a card: --for A10G or"),
        (["--quant", "AUTO", "--target-size", "2GB", "--for", "l4"], "--for decides by the time"),
        (["--quant", "Q4_K_M", "--target-bpw", "4"], "want --quant auto"),
        (["--target-kld", "0.01"], "want --quant auto"),
        (["--quant", "auto", "--target-bpw", "4", "--recipe", "x.toml"], "give one of them"),
    ],
)
def test_what_does_not_go_together(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--src", "nowhere", *flags]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--target-size", "4.0 parsec"], "want a number and a unit (B, kB, MB, GB, KiB, MiB, GiB)"),
        (["--target-bpw", "4.5bits"], "must be a positive number, without a unit; got '4.5bits'"),
        (["--target-kld", "-1"], "must be a positive number"),
        (["--target-ms", "inf"], "must be a positive number"),
        (["--for", "RTX"], "want one of A10G, L4, H100, H200; got 'RTX'"),
    ],
)
def test_malformed_targets(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--quant", "auto", *flags])
    assert complaint in capsys.readouterr().err


def test_a_size_that_cannot_be_is_refused_with_what_can(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--src", str(checkpoint), "--quant", "auto", "--out", str(tmp_path / "out"), "--threads", "1"]
    assert cli.main([*flags, "--target-size", "1kB"]) == 1
    error = capsys.readouterr().err
    assert "--target-size 1.0kB: below the smallest that this model's types come to; possible are" in error
    assert cli.main([*flags, "--target-bpw", "30"]) == 1
    assert "--target-bpw 30.0: above the largest" in capsys.readouterr().err
    assert cli.main([*flags, "--target-ms", "1", "--for", "A10G"]) == 1
    error = capsys.readouterr().err
    assert "--target-ms 1.0: above the largest" in error
    assert "ms on the A10G" in error
