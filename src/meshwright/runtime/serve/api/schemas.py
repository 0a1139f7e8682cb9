"""What may be asked, as the OpenAI API names it. What is not served is refused by name; nothing is dropped silently.

Beyond that API, named as vLLM names them: ``top_k``, ``ignore_eos``, ``stop_token_ids``, ``return_token_ids``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: Choices of one request, prompts of one request, stop strings and how long each is.
MAX_CHOICES, MAX_PROMPTS, MAX_STOPS, MAX_STOP = 16, 64, 16, 256
MAX_BIAS = 1024

TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]


class StreamOptions(BaseModel):
    """What a stream ends with."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOPS)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIAS)
    presence_penalty: Literal[0, None] = None
    frequency_penalty: Literal[0, None] = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _said(cls, value: Any) -> Any:
        """null is what was not said, as in the OpenAI API; also of what is not served."""
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """0.0 is the 0 that clients send."""
        return 0 if isinstance(value, float) and value == 0 else value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        """Token ids as strings, -100 to 100."""
        for token, plus in (value or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) < 10 and -100 <= plus <= 100):
                raise ValueError("token ids with a bias of -100 to 100 are needed")
        return value

    @model_validator(mode="after")
    def _stream_only(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams only")
        return self

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def bias(self) -> list[tuple[int, float]]:
        """Bias by token id."""
        return [(int(token), plus) for token, plus in (self.logit_bias or {}).items()]

    @property
    def usage_too(self) -> bool:
        """A stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Asked):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: Literal[1, None] = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(BaseModel):
    """A piece of text of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(Asked):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _asked_for(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self
