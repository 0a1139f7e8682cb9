"""vLLM's boot log: what every rank says it holds, and lines that say something else than they seem to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from re import Match

from meshwright.engines.base import BootLog
from meshwright.engines.vllm import log_lines
from meshwright.engines.vllm.log_lines import Fact
from meshwright.ledger.schema import Holding
from meshwright.specs.layout import Layout, product

#: Most lines that are read, and most ranks that are told apart.
MAX_LINES, MAX_RANKS = 2_000_000, 1 << 16

#: Fact -> term and name within it.
TERMS = {
    "weights": ("weights", "model"),
    "activations": ("activations", "peak"),
    "non_torch": ("runtime", "non_torch"),
    "cuda_graphs": ("runtime", "cuda_graphs"),
    "kv_cache": ("kv_cache", "pool"),
}
_DEGREES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "decode_context_parallel_size": "dcp",
    "prefill_context_parallel_size": "cp",
}
#: Facts of a rank that other terms are worked out from.
_PARTS = frozenset({"consumed", "estimated"})
#: Words that only vLLM prints.
_OURS = frozenset({"weights", "kv_cache", "tokens", "blocks", "consumed", "non_torch"})


@dataclass(slots=True)
class _State:
    """What has been read so far."""

    version: str = ""
    model: str | None = None
    settings: dict[str, int] = field(default_factory=dict)
    experts: bool = False
    by_rank: dict[str, dict[str, float]] = field(default_factory=dict)
    places: dict[str, Mapping[str, int]] = field(default_factory=dict)
    assigned: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, list[float]] = field(default_factory=dict)
    misleading: dict[str, str] = field(default_factory=dict)
    cut: dict[str, None] = field(default_factory=dict)
    seen: bool = False
    said_gb: bool = False


def read_log(lines: Iterable[str]) -> BootLog | None:
    """Read a boot log; None when nothing in it is vLLM's. Lines may be cut, interleaved or binary noise."""
    s = _State()
    notes: list[str] = []
    for number, raw in enumerate(lines):
        if number >= MAX_LINES:
            notes.append(f"only the first {MAX_LINES:,} lines were read")
            break
        _line(s, raw)
    if not s.seen:
        return None
    layout = _layout(s)
    ranks = _ranks(s, layout, notes)
    holdings = [
        Holding(f"rank {ranks[who]}", *TERMS[key], round(value), "measured")
        for who in sorted(s.by_rank, key=lambda w: ranks[w])
        for key, value in _terms(s.by_rank[who])
    ]
    tokens, note = _tokens(s)
    notes += [note] if note else []
    notes += [f"a line was cut: {stem!r} without its number" for stem in s.cut]
    if not holdings:
        notes.append("no line states memory of a rank")
    context = _least(s, "context") or s.settings.get("max_seq_len")
    return BootLog(
        engine="vllm",
        version=s.version,
        holdings=tuple(holdings),
        kv_cache_tokens=tokens,
        max_concurrency=_least(s, "concurrency"),
        context=round(context) if context else None,
        layout=layout,
        model=s.model,
        misleading=tuple(_misleading(s, layout).items()),
        notes=tuple(notes),
        device_bytes=round(total) if (total := _least(s, "total")) is not None else None,
    )


def _line(s: _State, raw: str) -> None:
    text = log_lines.clean(raw)
    _header(s, raw, text)
    _assigned(s, text)
    found = list(log_lines.facts(text))
    if not found:
        if (stem := log_lines.cut(text)) is not None and len(s.cut) < 20:
            s.cut[stem] = None
        return
    marks = log_lines.prefixes(text)
    for at, fact in found:
        before = [mark for place, mark in marks if place <= at]
        _note(s, fact, _who(before[-1]) if before else "", before[-1] if before else None, text)


def _header(s: _State, raw: str, text: str) -> None:
    """Version, model and degrees, where the engine prints its configuration."""
    started = log_lines.STARTED.search(text)
    api = log_lines.API.search(text)
    if started is not None or api is not None:
        s.seen = True
        s.version = s.version or (started or api)[1]  # type: ignore[index]
    if started is not None or "non-default args" in text:
        whole = log_lines.clean(raw, log_lines.MAX_CONFIG_LINE)
        if s.model is None and (model := log_lines.MODEL.search(whole)) is not None:
            s.model = model[1]
        for name, value in log_lines.DEGREE.findall(whole):
            s.settings.setdefault(name, int(value))
        s.experts = s.experts or log_lines.EXPERT.search(whole) is not None


def _assigned(s: _State, text: str) -> None:
    """``rank 3 in world size 16 is assigned as ...``: degrees from the largest places."""
    for match in log_lines.ASSIGNED.finditer(text):
        s.seen = True
        for axis, value in zip(("dp", "pp", "tp"), match.groups()[2:], strict=True):
            s.assigned[axis] = max(s.assigned.get(axis, 0), int(value))


def _who(mark: Match[str]) -> str:
    """A worker's name without what changes from start to start; pid and address where nothing else tells them apart."""
    if mark["who"] in {"APIServer", "ApiServer"}:
        return ""
    places = "".join(f"_{axis}{n}" for axis, n in log_lines.PLACE.findall(mark["places"]))
    if mark["who"] == "EngineCore":
        return f"core{places}"
    if places or mark["rank"] is not None:
        return f"{places}#{mark['rank'] or ''}"
    if mark["who"] == "Worker":  # the only rank: names of several carry their places
        return ""
    return f"pid {mark['pid']} {mark['ip'] or ''}"


def _note(s: _State, fact: Fact, who: str, mark: Match[str] | None, text: str) -> None:
    s.seen = s.seen or fact.key in _OURS
    if fact.key not in TERMS and fact.key not in _PARTS:
        s.scalars.setdefault(fact.key, []).append(fact.value)
        if fact.key == "world" and (at := text.find("Tensor parallel size (")) >= 0:
            s.misleading.setdefault(text[at : at + 70].strip(), "world")
        return
    if fact.key == "weights" and " GB" in text:
        s.said_gb = True
    if who not in s.by_rank and len(s.by_rank) >= MAX_RANKS:
        return
    row = s.by_rank.setdefault(who, {})
    if fact.key in {"weights", "cuda_graphs"} and fact.key in row:
        row[fact.key] = max(row[fact.key], fact.value)
    else:
        row[fact.key] = fact.value
    if mark is not None and mark["who"] != "EngineCore":
        s.places[who] = {axis.lower(): int(n) for axis, n in log_lines.PLACE.findall(mark["places"])}
        if mark["rank"] is not None:
            s.places[who] = {"rank": int(mark["rank"])}


def _terms(row: Mapping[str, float]) -> list[tuple[str, float]]:
    """Terms of one rank.

    What 0.33 prints as consumed is weights and the rest of it; its peak activation includes the estimate for CUDA
    graphs where that was taken (v1/worker/gpu_worker.py determine_available_memory).
    """
    out = dict(row)
    if "consumed" in out and "estimated" in out and "activations" in out:
        out["activations"] = max(0.0, out["activations"] - out["estimated"])
    if "consumed" in out and "weights" in out and "non_torch" not in out:
        out["non_torch"] = max(0.0, out["consumed"] - out["weights"])
    return [(key, out[key]) for key in TERMS if key in out]


def _layout(s: _State) -> Layout | None:
    degrees = {_DEGREES[name]: value for name, value in s.settings.items() if name in _DEGREES and 0 < value < 1 << 20}
    for axis, top in s.assigned.items():
        degrees.setdefault(axis, top + 1)
    for place in s.places.values():
        for axis in ("dp", "pp", "tp"):
            if axis in place and not s.settings:
                degrees[axis] = max(degrees.get(axis, 1), place[axis] + 1)
    if not degrees:
        return None
    flat = degrees.get("tp", 1) * degrees.get("dp", 1) * degrees.get("cp", 1)
    return Layout(**degrees, ep=flat if s.experts else 1)  # type: ignore[arg-type]


def _ranks(s: _State, layout: Layout | None, notes: list[str]) -> dict[str, int]:
    """Rank of every worker: from its places (dp, pp, tp in that order), else in the order of appearance."""
    out: dict[str, int] = {}
    guessed = 0
    for who in s.by_rank:
        place = s.places.get(who)
        if place is not None and "rank" in place:
            out[who] = place["rank"]
        elif place and layout is not None:
            out[who] = (place.get("dp", 0) * layout.pp + place.get("pp", 0)) * layout.cp * layout.tp + place.get(
                "tp", 0
            )
        elif who == "" or who.startswith("core"):
            core = log_lines.PLACE.findall(who)
            number = int(dict(core).get("DP", 0)) if core else 0
            out[who] = number * (layout.tp * layout.pp * layout.cp if layout is not None else 1)
        else:
            guessed += 1
            out[who] = _free(out)
    if guessed:
        notes.append(f"{guessed} workers print no rank; they are numbered in the order of appearance")
    return out


def _free(taken: Mapping[str, int]) -> int:
    used = set(taken.values())
    return next(n for n in range(len(used) + 1) if n not in used)


def _least(s: _State, key: str) -> float | None:
    return min(s.scalars[key]) if key in s.scalars else None


def _tokens(s: _State) -> tuple[int | None, str | None]:
    """Tokens of the KV pool: as printed, or blocks times block size in versions that print blocks only."""
    if "tokens" in s.scalars:
        values = sorted(set(s.scalars["tokens"]))
        note = f"replicas or ranks print {values[0]:,.0f} to {values[-1]:,.0f} tokens" if len(values) > 1 else None
        return round(values[0]), note
    if "blocks" in s.scalars:
        block = s.settings.get("block_size", 16)
        said = "" if "block_size" in s.settings else " (the usual size; the log states none)"
        return round(min(s.scalars["blocks"])) * block, f"tokens are blocks times {block} tokens{said}"
    return None, None


def _misleading(s: _State, layout: Layout | None) -> dict[str, str]:
    out: dict[str, str] = {}
    for line in s.misleading:
        world = round(s.scalars["world"][0])
        known = f", {product(layout)}" if layout is not None else ""
        out[line] = f"{world} is the world size of a replica (tp x pp){known}, not the tensor parallel size"
    if s.said_gb:
        out["weights took ... GB"] = "the number is in GiB (bytes / 2^30) in spite of the unit"
    if "tokens" in s.scalars:
        meaning = []
        if layout is not None and layout.pp > 1:
            meaning.append(
                "every stage caches its own layers for these tokens; the stage with the fewest blocks decides"
            )
        if layout is not None and layout.dp > 1:
            meaning.append(f"this is one replica's pool; {layout.dp} replicas hold {layout.dp} times as many")
        if "hybrid_block" in s.scalars:
            meaning.append(
                "layers of several kinds share the pool: tokens are maximum concurrency x context length, not pool "
                "bytes divided by bytes a token"
            )
        if meaning:
            out["KV cache size: N tokens"] = "; ".join(meaning)
    if "concurrency" in s.scalars:
        out["Maximum concurrency for N tokens per request"] = (
            "requests of the full context length that fit the cache; --max-num-seqs bounds requests apart from it"
        )
    return out
