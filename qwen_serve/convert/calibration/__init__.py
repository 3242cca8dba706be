"""The model's own text: its answers to authored prompts, for calibration and evaluation."""

from qwen_serve.convert.calibration.prompts import Purpose
from qwen_serve.convert.calibration.text import TEXT_VERSION, write_text
