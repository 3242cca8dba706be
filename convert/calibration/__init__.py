"""The model's own text: what it answers to a set of authored prompts, to calibrate and to measure it on."""

from qwen_serve.convert.calibration.prompts import Purpose
from qwen_serve.convert.calibration.text import TEXT_VERSION, write_text

__all__ = ["TEXT_VERSION", "Purpose", "write_text"]
