"""JSON from strangers: bounded in size, one document or many after each other."""

from __future__ import annotations

import json
from collections.abc import Iterator

from meshwright.doctor.readers import Source
from meshwright.errors import InputError

_WHITE = " \t\r\n,"


def load_json(source: Source, most: int) -> object:
    """One document of at most ``most`` bytes.

    Raises:
        InputError: larger, broken or nested too deep.
    """
    try:
        with source.open() as stream:
            data = stream.read(most + 1)
            while len(data) <= most and (more := stream.read(most + 1 - len(data))):
                data += more
        if len(data) > most:
            raise InputError(f"{source.name}: JSON of more than {most} bytes is not read")
        return json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise InputError(f"{source.name}: not readable as JSON ({error})") from None


def stream_json(source: Source, most: int) -> Iterator[object]:
    """Documents that follow each other, each of at most ``most`` characters, pretty-printed or one a line.

    Raises:
        InputError: broken; the documents before were handed out.
    """
    decoder = json.JSONDecoder()
    text, tried = "", 0
    try:
        with source.open() as stream:
            while piece := stream.read(1 << 20):
                text += piece.decode("utf-8", "replace")
                if len(text) < tried:
                    continue
                at = 0
                while at < len(text):
                    while at < len(text) and text[at] in _WHITE:
                        at += 1
                    try:
                        value, end = decoder.raw_decode(text, at)
                    except json.JSONDecodeError:
                        break
                    yield value
                    at = end
                text = text[at:]
                tried = 2 * len(text)
                if len(text) > most:
                    raise InputError(f"{source.name}: no JSON document ends within {most} characters")
            for value in _rest(decoder, text):
                yield value
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise InputError(f"{source.name}: not readable as JSON ({error})") from None


def _rest(decoder: json.JSONDecoder, text: str) -> Iterator[object]:
    at = 0
    while at < len(text):
        while at < len(text) and text[at] in _WHITE:
            at += 1
        if at == len(text):
            return
        value, at = decoder.raw_decode(text, at)
        yield value
