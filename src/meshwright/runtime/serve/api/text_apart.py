"""A process apart that turns text into token ids and back, and messages into prompts: ``python -m`` this module.

It reads a stranger's ``tokenizer.json`` and renders a stranger's chat template, so it lives alone: bounded in memory,
stopped when it takes too long, its templates in a sandbox without attributes of Python. One JSON object a line in, one
out. No torch.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Address space of this process.
MEMORY_BYTES = 3 << 30
#: What a text that ends within a character decodes to at its end.
BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_CONFIG = 16 << 20


class Apart:
    """What the process knows of one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.config = _json(folder / "tokenizer_config.json")
        self.template = self._template(folder)

    def _template(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        if file.is_file() and file.stat().st_size < MAX_CONFIG:
            return file.read_text(encoding="utf-8")
        found = self.config.get("chat_template")
        if isinstance(found, list):
            named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text; ``special``: with what the tokenizer puts around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def pieces(self, ids: list[int]) -> list[str]:
        """Every token alone."""
        return [self.tokenizer.decode([i], skip_special_tokens=False) for i in ids]

    def step(self, ids: list[int], said: int, whole: bool) -> str | None:
        """What the tokens after the first ``said`` add to the text; None while they end within a character.

        ``whole``: nothing is held back.
        """
        before = self.tokenizer.decode(ids[:said]) if said else ""
        text = self.tokenizer.decode(ids)
        return None if text.endswith(BROKEN) and not whole else text[len(before) :]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks.

        Raises:
            ValueError: the checkpoint has no chat template, or it refuses the conversation.
        """
        if self.template is None:
            raise ValueError("this model has no chat template; use /v1/completions")
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(str(message)[:200])

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        words = {key: _word(self.config.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        text = environment.from_string(self.template).render(messages=messages, add_generation_prompt=True, **words)
        return self.encode(text, special=False)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > MAX_CONFIG:
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _word(value: Any) -> str:
    """A special token, stored as a string or as an object with its content."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    apart = Apart(Path(sys.argv[1]))
    work: dict[str, Callable[..., Any]] = {
        "encode": apart.encode,
        "pieces": apart.pieces,
        "step": apart.step,
        "chat": apart.chat,
    }
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"out": work[job["op"]](*job["args"])}
        except BaseException as error:
            answer = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
