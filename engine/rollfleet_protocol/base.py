"""Base of all wire models: frozen values, camelCase on the wire, snake_case in Python."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Request(BaseModel):
    """What a caller sends. Unknown fields are refused: a typo must not become a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Answer(BaseModel):
    """What a guard answers. Unknown fields are ignored, so that a newer guard can talk to an older operator."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)
