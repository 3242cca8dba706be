"""Reads and checks the parts of a Qwen3.5 `config.json` that the conversion needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, TypeGuard

from qwen_serve.convert.config_keys import check_config, check_rope
from qwen_serve.convert.config_levels import OFTEN_ASKED, TIED, text_values
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.prequantized import check_method, method_of

DENSE_ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
MOE_ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
ARCHITECTURES = (*DENSE_ARCHITECTURES, *MOE_ARCHITECTURES)
BY_TYPE = dict(
    zip(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), ARCHITECTURES, strict=True)
)
"""The architecture of a `model_type`, where a configuration has none."""
ARCHS = ("qwen35", "qwen35moe")
"""llama.cpp's names for the dense and the expert models: `general.architecture`."""
LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_INTERVAL = 4  # transformers' default: every 4th layer is full attention
DEFAULT_MROPE_SECTION = (11, 11, 10)
DEFAULT_ROTARY = 0.25
DEFAULT_THETA = 10_000.0  # transformers' where none is given
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
MAX_LAYERS, MAX_EXPERTS = 512, 1024  # llama-hparams.h
MAX_INTEGER = 2**31 - 1
TINY, HUGE = 1e-37, 1e38
MOST_ATTENTION = 65504.0  # largest factor on queries and keys, which are kept in F16
DELTA_NET_WIDTHS = (16, 32, 64, 128)
CONV_KERNELS = (3, 4, 5, 9, 15)


@dataclass(frozen=True)
class Experts:
    """The routed experts of each block, of which a token uses `used` of `count`, and the shared expert.
    Widths are in elements."""

    count: int
    used: int
    ffn: int
    shared_ffn: int


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and hyperparameters of the text model. Counts are in heads, layers or elements, as the names
    say."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    """Width of the dense FFN; unused with experts, where official configurations leave it out."""
    experts: Experts | None
    n_heads: int
    n_kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    layer_types: tuple[str, ...]
    attention_interval: int
    n_mtp_layers: int
    tied_embeddings: bool
    max_positions: int
    rms_norm_eps: float
    rope: Mapping[str, Any] = field(hash=False)
    special_token_ids: Mapping[str, int] = field(hash=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)
    """What is in the configuration and has no effect, for the user."""

    @property
    def n_layers(self) -> int:
        return len(self.layer_types)

    @property
    def arch(self) -> str:
        """One of `ARCHS`."""
        return ARCHS[self.experts is not None]

    @property
    def mrope_sections(self) -> tuple[int, ...]:
        """Rotary pairs for time, height, width, and a fourth that Qwen3.5 leaves empty."""
        sections = [int(n) for n in self.rope.get("mrope_section", DEFAULT_MROPE_SECTION)]
        return tuple((sections + [0] * 4)[:4])

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * float(self.rope.get("partial_rotary_factor", DEFAULT_ROTARY)))

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed `config.json`, with `text_config` inside (the official layout) or flat.

        Raises: CheckpointError: another architecture, a quantized checkpoint, a field that is missing or
            wrong, or an unknown field that may change the model.
        """
        named = config.get("architectures") or [BY_TYPE.get(str(config.get("model_type")), "(none)")]
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise CheckpointError(f"config.json: architectures must be a list of names, got {named!r}")
        if not isinstance(config.get("text_config", {}), Mapping):
            raise CheckpointError(
                f"config.json: text_config must be an object, got {config['text_config']!r}"
            )
        if not set(named) & set(ARCHITECTURES):
            asked = next((f" ({OFTEN_ASKED[name]})" for name in named if name in OFTEN_ASKED), "")
            raise CheckpointError(
                f"config.json: architectures is {', '.join(map(str, named))}{asked}; "
                f"this converter knows {', '.join(ARCHITECTURES)} (Qwen3.5 to 3.8, dense and with experts)"
            )
        has_experts = bool(set(named) & set(MOE_ARCHITECTURES))
        text, remarks = text_values(config, named, has_experts)
        if method := method_of(config):
            check_method(method)
        remarks += check_config(config)
        _Fields(config.get("text_config") or {}).boolean(TIED)  # it may be unread, and is wrong all the same
        fields = _Fields(text)
        interval = fields.integer("full_attention_interval", DEFAULT_INTERVAL)
        n_layers = fields.integer("num_hidden_layers")
        key_heads, value_heads = (
            fields.integer("linear_num_key_heads"),
            fields.integer("linear_num_value_heads"),
        )
        if value_heads % key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads ({value_heads}) must be a multiple of "
                f"linear_num_key_heads ({key_heads})"
            )
        heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
        check_heads(heads, kv_heads)
        key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
        _check_linear(key_dim, value_dim, fields.integer("linear_conv_kernel_dim"))
        n_mtp_layers = _mtp_layers(text)
        if n_layers + n_mtp_layers > MAX_LAYERS:
            raise CheckpointError(
                f"config.json: num_hidden_layers is {n_layers}; llama.cpp has room for {MAX_LAYERS}, "
                "the MTP block included"
            )
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
        rope, rope_remarks = rope_parameters(text)
        _check_rotary(rope, head_dim)
        special, special_remarks = _special_token_ids(config, fields.integer("vocab_size"))
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size")
            if not has_experts or "intermediate_size" in text
            else None,
            experts=_experts(fields) if has_experts else None,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            linear_key_heads=key_heads,
            linear_value_heads=value_heads,
            linear_key_dim=key_dim,
            linear_value_dim=value_dim,
            conv_kernel=fields.integer("linear_conv_kernel_dim"),
            layer_types=_layer_types(text.get("layer_types"), n_layers, interval),
            attention_interval=interval,
            n_mtp_layers=n_mtp_layers,
            tied_embeddings=fields.boolean("tie_word_embeddings"),
            max_positions=fields.integer("max_position_embeddings"),
            rms_norm_eps=fields.positive("rms_norm_eps"),
            rope=rope,
            special_token_ids=special,
            remarks=(*remarks, *rope_remarks, *special_remarks),
        )


class _Fields:
    """Looks up numbers, and names the field in errors."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        return checked_integer(name, default if value is None and default is not None else value)

    def positive(self, name: str) -> float:
        value = self._values.get(name)
        if not is_positive(value):
            raise CheckpointError(f"config.json: {name} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, got {value!r}")
        return bool(value)


def checked_integer(name: str, value: Any) -> int:
    """The integer `value` of the field `name`. Raises: CheckpointError: it is not an integer from 1 to 2**31
    - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive integer, got {value!r}")
    if value > MAX_INTEGER:
        raise CheckpointError(f"config.json: {name} must be at most {MAX_INTEGER}, got {value!r}")
    return value


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether it is a number above 0, also as a float32, which llama.cpp uses."""
    return isinstance(value, int | float) and not isinstance(value, bool) and TINY < value < HUGE


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises: CheckpointError: query heads cannot share the key heads evenly."""
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
            f"({kv_heads})"
        )


def _check_linear(key_dim: int, value_dim: int, conv_kernel: int) -> None:
    """Raises CheckpointError for shapes of gated delta nets that llama.cpp lacks (models/qwen35.cpp;
    ggml-cuda's gated_delta_net, ssm-conv)."""
    if value_dim != key_dim:
        raise CheckpointError(
            f"config.json: linear_value_head_dim ({value_dim}) must be linear_key_head_dim ({key_dim}): "
            "llama.cpp has one width for both"
        )
    for name, value, known in (
        ("linear_key_head_dim", key_dim, DELTA_NET_WIDTHS),
        ("linear_conv_kernel_dim", conv_kernel, CONV_KERNELS),
    ):
        if value not in known:
            raise CheckpointError(
                f"config.json: {name} is {value}; llama.cpp's kernels are for {', '.join(map(str, known))}"
            )


def _check_rotary(rope: Mapping[str, Any], head_dim: int) -> None:
    """Raises: CheckpointError: llama.cpp would rotate other elements than transformers, or rotate some by a
    position that text does not have."""
    factor = rope.get("partial_rotary_factor", DEFAULT_ROTARY)
    if not is_positive(factor) or factor > 1 or (n_rot := int(head_dim * factor)) < 2 or n_rot % 2:
        raise CheckpointError(
            f"config.json: rope_parameters.partial_rotary_factor is {factor!r}; want a share of head_dim "
            f"({head_dim}) that is an even number of elements, at most all"
        )
    sections = rope.get("mrope_section", DEFAULT_MROPE_SECTION)
    if (
        not isinstance(sections, list | tuple)
        or len(sections) not in (3, 4)
        or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in sections)
        or any(sections[3:])
        or sum(sections) == 0
        or sum(sections) > head_dim
    ):
        raise CheckpointError(
            f"config.json: rope_parameters.mrope_section must be three numbers of pairs, got {sections!r}"
        )
    # pair i uses axis i % 3 while that axis has pairs left, else a position that text does not have
    period = sum(sections)
    if any(i % period >= 3 * sections[i % period % 3] for i in range(n_rot // 2)):
        raise CheckpointError(
            f"config.json: rope_parameters.mrope_section {list(sections)} leaves pairs of {n_rot} rotated "
            "elements without an axis in llama.cpp, which interleaves the three"
        )


def _experts(fields: _Fields) -> Experts:
    count, used = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    if used > count:
        raise CheckpointError(
            f"config.json: num_experts_per_tok ({used}) must be at most num_experts ({count})"
        )
    if count > MAX_EXPERTS:
        raise CheckpointError(f"config.json: num_experts is {count}; llama.cpp has room for {MAX_EXPERTS}")
    return Experts(
        count=count,
        used=used,
        ffn=fields.integer("moe_intermediate_size"),
        shared_ffn=fields.integer("shared_expert_intermediate_size"),
    )


def _layer_types(given: Any, n_layers: int, interval: int) -> tuple[str, ...]:
    if given is None:
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(n_layers))
    if (
        not isinstance(given, Sequence)
        or len(given) != n_layers
        or any(kind not in (LINEAR, FULL) for kind in given)
    ):
        raise CheckpointError(
            f"config.json: layer_types must be num_hidden_layers ({n_layers}) names, each {LINEAR} or {FULL}"
        )
    if len(set(given)) == 1:
        raise CheckpointError(
            f"config.json: layer_types has {given[0]} alone; llama.cpp computes Qwen3.5 with both kinds"
        )
    return tuple(given)


def _mtp_layers(text: Mapping[str, Any]) -> int:
    count = text.get("mtp_num_hidden_layers") or 0
    if count not in (0, 1):
        raise CheckpointError(f"config.json: mtp_num_hidden_layers is {count!r}; llama.cpp runs 0 or 1")
    return int(count)


def rope_parameters(text: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The rotary embedding's settings, checked, with `rope_type` among them; and remarks.

    `rope_scaling` replaces `rope_parameters` as a whole, as in transformers (modeling_rope_utils.py,
    `convert_rope_params_to_dict`).

    Raises: CheckpointError: a kind that llama.cpp does not know, or a number is missing.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(text.get(name) or {}, Mapping):
            raise CheckpointError(f"config.json: {name} must be an object, got {text[name]!r}")
    remarks: list[str] = []
    rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    for key in ("rope_theta", "partial_rotary_factor"):  # older configs have them one level up
        if key not in rope and key in text:
            rope[key] = text[key]
    rope.setdefault("rope_theta", DEFAULT_THETA)
    if text.get("rope_scaling") and (before := text.get("rope_parameters")):
        same = {"rope_type", "mrope_interleaved"} | {key for key in rope if rope[key] == before.get(key)}
        if lost := [f"{key} {value!r}" for key, value in before.items() if key not in same]:
            remarks.append(
                "config.json: rope_scaling replaces rope_parameters, as in transformers, so without effect "
                f"are {', '.join(lost)} (rope_theta is {rope['rope_theta']:g}); put what should hold into "
                "rope_scaling"
            )
    if "attn_factor" in rope:  # llama.cpp's converter treats it as `attention_factor`
        rope.setdefault("attention_factor", rope.pop("attn_factor"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":  # Qwen2-VL's word for the default with sections
        kind = "default"
    if kind not in ("default", "linear", "yarn"):
        raise CheckpointError(f"config.json: rope_type is {kind!r}; known are default, linear and yarn")
    rope["rope_type"] = kind
    if kind == "yarn":
        original = "original_max_position_embeddings"
        if original in text:  # transformers prefers the one beside
            rope[original] = text[original]
        elif "max_position_embeddings" in text:
            rope.setdefault(original, text["max_position_embeddings"])
    needed = {"default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings")}[
        kind
    ]
    for key in ("rope_theta", *needed):
        if not is_positive(rope.get(key)):
            raise CheckpointError(
                f"config.json: rope_parameters.{key} must be a positive number, got {rope.get(key)!r}"
            )
    if kind == "yarn":
        name = "original_max_position_embeddings"
        checked_integer(f"rope_parameters.{name}", rope[name])
    for key in ("factor", "attention_factor", "mscale", "mscale_all_dim"):
        value = rope.get(key)
        if value is not None and not (is_positive(value) and (key == "factor" or value <= MOST_ATTENTION)):
            raise CheckpointError(
                f"config.json: rope_parameters.{key} must be a positive number within F16's range, "
                f"got {value!r}"
            )
    if kind == "yarn" and rope["factor"] < 1:
        raise CheckpointError(
            f"config.json: rope_parameters.factor must be at least 1, got {rope['factor']!r}"
        )
    return rope, remarks + check_rope(rope)


def attention_factor_ratio(rope: Mapping[str, Any]) -> float:
    """YaRN's factor on cos and sin divided by the one that llama.cpp infers, 0.1 ln(factor) + 1; else 1.

    As in transformers' `_compute_yarn_parameters`: the explicit factor, else from mscale and mscale_all_dim.
    """
    if rope["rope_type"] != "yarn":
        return 1.0

    def mscale(scale: float) -> float:
        return 0.1 * scale * log(rope["factor"]) + 1.0

    said = rope.get("attention_factor")
    if said is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        said = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return 1.0 if said is None else float(said / mscale(1.0))


def _special_token_ids(config: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, int], list[str]]:
    """The ids of `SPECIAL_TOKENS` that are in the vocabulary, and remarks about the others."""
    ids: dict[str, int] = {}
    remarks: list[str] = []
    for values in (config.get("text_config") or {}, config):  # the outer level takes precedence
        for kind in SPECIAL_TOKENS:
            value = values.get(f"{kind}_token_id")
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                continue
            if value < vocab_size:
                ids[kind] = value
            else:
                remarks.append(
                    f"config.json: {kind}_token_id is {value}, which has no row in the embedding (vocab_size "
                    f"{vocab_size}): ignored"
                )
    return ids, remarks
