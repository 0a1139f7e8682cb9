"""Send requests as they are due, or keep so many under way, and collect what each met with."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from meshwright.runtime.load.arrivals import Arrival
from meshwright.runtime.load.client import Target, Timed, complete

#: Requests that may be under way at once; an open loop that would exceed it sends late, and says so.
MAX_UNDER_WAY = 1024
#: Words of prompts that are sent as text; each is one token or two for common tokenizers.
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random prompts.

    Attributes:
        vocabulary: token ids below it are drawn; None: prompts are words. seed: of the draw.
    """

    vocabulary: int | None = None
    seed: int = 0

    def of(self, number: int, tokens: int) -> str | list[int]:
        """Prompt of a request; the same for the same seed."""
        rng = random.Random(self.seed * 1_000_003 + number)
        if self.vocabulary is None:
            return " ".join(rng.choice(WORDS) for _ in range(tokens))
        return [rng.randrange(1, self.vocabulary) for _ in range(tokens)]


def drive(
    target: Target,
    arrivals: Sequence[Arrival],
    prompts: Prompts,
    concurrency: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Timed]:
    """Send all requests and wait for all answers.

    Args:
        target: server. arrivals: when, and how long. prompts: what.
        concurrency: so many are kept under way (closed loop); None: each is sent when it is due (open loop).
        progress: is told how many have ended, and failed, about once a second.
    """
    out = [Timed(a.at_s, a.input_tokens) for a in arrivals]
    began = time.perf_counter()
    ended, failed, told, lock = 0, 0, began, threading.Lock()

    def one(number: int) -> None:
        nonlocal ended, failed, told
        arrival = arrivals[number]
        complete(target, prompts.of(number, arrival.input_tokens), arrival.output_tokens, number, out[number], began)
        with lock:
            ended, failed = ended + 1, failed + (out[number].error is not None)
            if progress is not None and time.perf_counter() - told > 1:
                told = time.perf_counter()
                progress(ended, failed)

    workers = min(concurrency or MAX_UNDER_WAY, len(arrivals))
    with ThreadPoolExecutor(workers, thread_name_prefix="client") as clients:
        try:
            for number, arrival in enumerate(arrivals):
                if concurrency is None:
                    time.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
                clients.submit(one, number)
            clients.shutdown()
        except KeyboardInterrupt:  # what was not sent is not: only what is under way is waited for
            clients.shutdown(wait=False, cancel_futures=True)
            raise
    if concurrency is not None:
        for timed in out:
            timed.due_s = timed.sent_s
    return out
