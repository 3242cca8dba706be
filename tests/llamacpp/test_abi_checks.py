"""Checks of llama.cpp's internals pass, and each fails if its internals differ."""

import ctypes
import re
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import pytest
from llama_cpp import llama_cpp_ext

from qwen_serve.llamacpp import Context, ContextOptions, Model, abi_checks, abi_checks_model, ggml, log
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.vision import has_vision
from qwen_serve.server.engine.ubatches import ubatches

PACKAGE = Path(abi_checks.__file__).parent


@pytest.mark.parametrize("check", abi_checks.LIBRARY, ids=lambda check: check.name)
def test_this_library_is_as_expected(check: abi_checks.Check) -> None:
    assert check.found() == ""


def test_all_are_listed(nano_f32: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert abi_checks_model.main([str(nano_f32)]) == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*(check.name for check in abi_checks.LIBRARY), "split_equal", "output_reserve"]


def test_a_failure_names_what_is_different_and_who_needs_it() -> None:
    checks = [
        abi_checks.Check("a", "nobody", lambda: ""),
        abi_checks.Check("b", "drafts", lambda: "it is 1, not 2"),
    ]
    with pytest.raises(
        LlamaError, match=r"expects it: b: it is 1, not 2\. Relied on by drafts; `make setup`"
    ):
        abi_checks.require(checks)


def test_llama_cpp_is_not_started_where_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi_checks, "LIBRARY", [abi_checks.Check("a", "all", lambda: "missing")])
    monkeypatch.setattr(C, "llama_backend_init", lambda: pytest.fail("started"))
    with pytest.raises(LlamaError, match="a: missing"):
        log.set_up.__wrapped__()


def test_a_larger_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    overhead = ggml.tensor_overhead()
    monkeypatch.setattr(ggml, "tensor_overhead", lambda: overhead + 8)
    assert re.fullmatch(r"it has \d+ bytes, not \d+", abi_checks.tensor_layout())


def test_a_tensor_with_fields_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [*ggml.Tensor._fields_]
    fields[2], fields[3] = ("nb", ctypes.c_size_t * 4), ("ne", ctypes.c_int64 * 4)
    monkeypatch.setattr(ggml, "Tensor", type("Tensor", (ctypes.Structure,), {"_fields_": fields}))
    assert abi_checks.tensor_layout().startswith("ne is [4, 24, 120, 120], not [6, 5, 1, 1]; nb is")


def test_types_with_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {**abi_checks.TYPES, 8: b"q8_1"}
    monkeypatch.setattr(ggml, "quick", lambda *_: names.get)
    assert abi_checks.type_numbers() == "8 is b'q8_1', not b'q8_0'"


def renamed(struct: Any, old: str, new: str) -> Any:
    fields = [(new if name == old else name, kind) for name, kind in struct._fields_]
    return type(struct.__name__, (ctypes.Structure,), {"_fields_": fields})


def test_a_parameter_with_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "llama_context_params", renamed(C.llama_context_params, "n_rs_seq", "n_rollback"))
    assert abi_checks.fields() == "there is no llama_context_params.n_rs_seq"


@pytest.mark.skipif(not has_vision(), reason="llama.cpp was built without libmtmd")
def test_a_parameter_of_a_vision_tower_with_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_cpp import mtmd_cpp as mtmd  # loads the library

    struct = renamed(mtmd.mtmd_context_params, "image_min_tokens", "min_tokens")
    monkeypatch.setattr(mtmd, "mtmd_context_params", struct)
    found = abi_checks.missing_fields(mtmd, abi_checks.VISION_PARAMETERS)
    assert found == "there is no mtmd_context_params.image_min_tokens"


def test_every_parameter_that_is_set_is_listed() -> None:
    sources = "".join(path.read_text() for path in PACKAGE.glob("*.py"))
    parameters = abi_checks.PARAMETERS | abi_checks.VISION_PARAMETERS
    listed = {name for names in parameters.values() for name in names.split()}
    used = set(re.findall(r"\bparams\.(\w+)\b(?=[^=\n]* = )", sources))
    assert len(used) > 20
    assert used <= listed


def test_parameters_with_a_field_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's structure begins with a field that the bindings lack."""
    made = C.llama_context_default_params()
    shifted = type(made)()
    size = ctypes.sizeof(made)
    ctypes.memmove(ctypes.addressof(shifted) + 4, ctypes.addressof(made), size - 4)
    monkeypatch.setattr(C, "llama_context_default_params", lambda: shifted)
    assert "n_batch of llama_context_default_params is 512, not 2048" in abi_checks.defaults()


def test_an_extension_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(llama_cpp_ext, "llama_get_embeddings_nextn")
    assert abi_checks.extensions() == "llama_cpp_ext has no llama_get_embeddings_nextn"


def test_other_flags_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "LLAMA_STATE_SEQ_FLAGS_ON_DEVICE", 4)
    assert abi_checks.state_flags().endswith("are [1, 4], not [1, 2]")


def test_system_information_in_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "llama_print_system_info", lambda: b"CPU: AVX2, AMX_INT8")
    assert "has no word like 'AVX2 = 1 | '" in abi_checks.system_info()


def test_a_batch_is_computed_in_the_order_in_which_it_is_written(nano_f32: Path) -> None:
    ragged, found = abi_checks_model.passes(nano_f32)
    assert found == abi_checks_model.PASSES[ragged]


@pytest.mark.parametrize("ragged", [False, True])
def test_the_order_in_which_a_batch_is_written(ragged: bool) -> None:
    starts, expected = [0] * 3, []
    for one in ubatches(abi_checks_model.LENGTHS, abi_checks_model.N_UBATCH, ragged=ragged):
        expected.append([100 * (s + 1) + starts[s] + i for s, length in one for i in range(length)])
        for s, length in one:
            starts[s] += length
    assert expected == abi_checks_model.PASSES[ragged]


def test_another_order_of_computation(monkeypatch: pytest.MonkeyPatch, nano_f32: Path) -> None:
    monkeypatch.setattr(abi_checks_model, "N_UBATCH", 16)
    assert abi_checks_model.split_equal(nano_f32).startswith("tokens are computed as [[100, 200, ")


def test_hidden_rows_are_behind_the_logits(nano_f32: Path) -> None:
    assert abi_checks_model.output_reserve(nano_f32) == ""


def test_hidden_rows_that_are_elsewhere(nano_f32: Path) -> None:
    """They are not read."""
    model = Model(nano_f32, n_gpu_layers=0, load_mtp=True)
    options: ContextOptions = abi_checks_model.OPTIONS
    context = Context(model, options)
    context.keep_hidden()
    context.tokens[0], context.outputs[0] = 1, 1
    context.decode(1)
    context._n_reserved += 1  # noqa: SLF001 - another llama.cpp would have it so
    with pytest.raises(LlamaError, match=r"output_reserve: they begin \d+ bytes behind logits, not"):
        context.hidden(1)
    context._n_reserved -= 1  # noqa: SLF001 - another llama.cpp would have it so
    assert context.hidden(1).shape == (1, model.n_embd)
    context.close()
    model.close()
