"""Texts that no step of a conversion is fitted to, and that differ in kind from what it is calibrated on."""

from qwen_serve.convert.evaluation.texts import KINDS, TEXTS, Kind, write_any, write_unlike
