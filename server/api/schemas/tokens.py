"""/tokenize and /detokenize, as llama-server has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TokenizeRequest(BaseModel):
    """Text to ids. `add_special` puts the beginning-of-sequence token first, where the model has one."""

    model_config = ConfigDict(strict=True)

    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeRequest(BaseModel):
    """Ids to text; control tokens have none."""

    model_config = ConfigDict(strict=True)

    tokens: list[int]
