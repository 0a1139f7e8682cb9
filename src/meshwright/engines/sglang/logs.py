"""SGLang's boot log: weights, cache pools, graphs, tokens. Lines may be cut, interleaved between ranks, or noise.

``GB`` in these lines is GiB: ``get_available_gpu_memory`` divides by ``1 << 30`` (``utils/common.py``), and the tokens
printed beside the sizes agree (case C015: 367,404 tokens of 48,128 bytes are 2 x 8.23 GiB). Forms of 0.3 to 0.5.23
(``model_executor/model_runner.py``, ``mem_cache/memory_pool.py``, ``cuda_graph_setup.py``, ``managers/scheduler.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.engines.base import BootLog
from meshwright.ledger.schema import Holding
from meshwright.specs.layout import MAX_DEGREE, Layout
from meshwright.specs.units import GIB

#: Lines, ranks, and characters of a line that are read.
MAX_LINES = 2_000_000
MAX_RANKS = 4096
MAX_LINE = 20_000
#: Characters of one rank's piece of a line that are searched; its patterns look ahead, so longer ones would take long.
MAX_PIECE = 1000

_PREFIX = re.compile(r"\[(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d((?: (?:DP|PP|TP|EP|ATTN_CP|CP|MOE_DP)\d+)*)\]")
_PLACE = re.compile(r"\b(DP|PP|TP)(\d{1,5})")
_SIZE = r"(-?\d{1,6}\.\d+) ?GB"
_DISTRIBUTED = re.compile(r"Init torch distributed ends\..*?mem usage=" + _SIZE)
_BEGIN = re.compile(r"Load weight begin\. avail mem=" + _SIZE)
_END = re.compile(r"Load weight end\..*?avail mem=" + _SIZE + r"(?:, mem usage=" + _SIZE + r")?")
_TYPE = re.compile(r"type=([A-Za-z0-9_]{1,80})")
_POOL = re.compile(r"(?<!Virtual)KV [Cc]ache (?:is )?allocated\..*?#tokens: (\d{1,12}), (.{0,120})")
_HALF = re.compile(r"(?:K|V|KV|index K|Cache) size: " + _SIZE)
_MAMBA = re.compile(r"Mamba Cache is allocated\..*?conv_state size: " + _SIZE + r",? ssm_state size: " + _SIZE)
_POOL_END = re.compile(r"Memory pool end\. avail mem=" + _SIZE)
_GRAPH = re.compile(r"Capture (?:(\w+) )?(?:\w+ )?(?:cuda|CUDA) graph end\..*?mem usage=" + _SIZE)
_TOTAL = re.compile(r"max_total_num_tokens=(\d{1,12}), chunked_prefill_size=")
_CONTEXT = re.compile(r"context_len=(\d{1,10})")
_ARGS = re.compile(r"server_args=ServerArgs\(")
_ARGUMENT = re.compile(r"\b(model_path|tp_size|pp_size|dp_size|attn_dp_size|ep_size)=(?:'([^']{1,300})'|(\d{1,7}))")
_OLD_DP = re.compile(r"\benable_dp_attention=True")
_VERSION = re.compile(r"sglang(?:[-=_ ]| version[: ]| v)+v?(\d+\.\d+\.\d+)", re.IGNORECASE)


@dataclass(slots=True)
class _Rank:
    """What one rank printed, in GiB."""

    begin: float | None = None
    distributed: float | None = None
    weights: list[tuple[str, float]] = field(default_factory=list)
    pools: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, float] = field(default_factory=dict)
    pool_end: float | None = None


@dataclass(slots=True)
class _Log:
    """What the whole log says."""

    ranks: dict[tuple[int, int, int], _Rank] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    old_attention_dp: bool = False
    version: str = ""
    tokens: int | None = None
    context: int | None = None
    allocated: list[int] = field(default_factory=list)

    def rank(self, place: tuple[int, int, int]) -> _Rank | None:
        """The rank at (dp, pp, tp); None once there are too many."""
        if place not in self.ranks and len(self.ranks) >= MAX_RANKS:
            return None
        return self.ranks.setdefault(place, _Rank())


def read_log(lines: Iterable[str]) -> BootLog | None:
    """Read a boot log; None when no line of it is SGLang's."""
    log = _Log()
    cut = False
    for number, line in enumerate(lines):
        if number >= MAX_LINES:
            cut = True
            break
        _read_line(log, line[:MAX_LINE])
    if not log.ranks and not log.arguments:
        return None
    return _finished(log, cut)


def _read_line(log: _Log, line: str) -> None:
    if _ARGS.search(line):
        for name, text, number in _ARGUMENT.findall(line):
            log.arguments.setdefault(name, text or number)
        log.old_attention_dp |= _OLD_DP.search(line) is not None
    if not log.version and (match := _VERSION.search(line)):
        log.version = match[1]
    if match := _TOTAL.search(line):
        tokens = int(match[1])
        log.tokens = tokens if log.tokens is None else min(log.tokens, tokens)
        if context := _CONTEXT.search(line):
            log.context = int(context[1])
    if "mem" in line or "ache" in line:
        _read_memory(log, line)


def _read_memory(log: _Log, line: str) -> None:
    """Several ranks' pieces may stand in one line: every prefix starts a piece."""
    starts = [m.start() for m in _PREFIX.finditer(line)] or [0]
    for begin, end in zip(starts, [*starts[1:], len(line)], strict=True):
        piece = line[begin : min(end, begin + MAX_PIECE)]
        patterns = (_DISTRIBUTED, _BEGIN, _END, _POOL, _MAMBA, _POOL_END, _GRAPH)
        matches = [(p, m) for p in patterns if (m := p.search(piece)) is not None]
        if matches and (rank := log.rank(_place(piece))) is not None:
            for pattern, match in matches:
                _take(log, rank, pattern, match, piece)


def _take(log: _Log, rank: _Rank, pattern: re.Pattern[str], match: re.Match[str], piece: str) -> None:
    if pattern is _DISTRIBUTED:
        rank.distributed = float(match[1])
    elif pattern is _BEGIN:
        rank.begin = float(match[1])
    elif pattern is _END:
        used = float(match[2]) if match[2] else None
        if used is None and rank.begin is not None:
            used = rank.begin - float(match[1])
        kind = _TYPE.search(piece)
        if used is not None and used > 0:
            rank.weights.append((kind[1] if kind else "model", used))
    elif pattern is _POOL:
        log.allocated.append(int(match[1]))
        rank.pools[f"pool {len(rank.pools)}"] = sum(map(float, _HALF.findall(match[2])))
    elif pattern is _MAMBA:
        rank.pools["recurrent states"] = float(match[1]) + float(match[2])
    elif pattern is _POOL_END:
        rank.pool_end = float(match[1])
    else:
        rank.graphs[match[1] or "decode"] = float(match[2])


def _place(piece: str) -> tuple[int, int, int]:
    """(dp, pp, tp) of the prefix ``[2025-10-16 09:06:22 DP1 TP5]``; zeros where it names none."""
    match = _PREFIX.match(piece)
    found = {axis: int(n) for axis, n in _PLACE.findall(match[1])} if match else {}
    return found.get("DP", 0), found.get("PP", 0), found.get("TP", 0)


def _finished(log: _Log, cut: bool) -> BootLog:
    layout = _layout(log)
    tp_size = int(log.arguments.get("tp_size", 0)) or 1 + max((tp for _, _, tp in log.ranks), default=0)
    holdings: list[Holding] = []
    for (_, pp, tp), rank in sorted(log.ranks.items()):
        name = f"rank {pp * tp_size + tp}"
        for number, (kind, size) in enumerate(rank.weights):
            holdings.append(_row(name, "weights", kind if number == 0 else f"draft {kind}", size))
        for kind, size in rank.pools.items():
            holdings.append(_row(name, "kv_cache", kind, size))
        for kind, size in rank.graphs.items():
            holdings.append(_row(name, "runtime", f"{kind} graphs", size))
        if rank.distributed:
            holdings.append(_row(name, "runtime", "communicators", rank.distributed))
    tokens = log.tokens if log.tokens is not None else min(log.allocated, default=None)
    notes = []
    if cut:
        notes.append(f"the log has over {MAX_LINES:,} lines; the rest is not read")
    if not any(r.weights for r in log.ranks.values()):
        notes.append("no 'Load weight end' line: the log is cut before the weights were loaded")
    elif tokens is None:
        notes.append("no 'KV Cache is allocated' line: the log is cut before the cache was made")
    return BootLog(
        engine="sglang",
        version=log.version,
        holdings=tuple(h for h in holdings if h.bytes > 0),
        kv_cache_tokens=tokens,
        max_concurrency=tokens / log.context if tokens and log.context else None,
        context=log.context,
        layout=layout,
        model=log.arguments.get("model_path"),
        misleading=_misleading(layout, log),
        notes=tuple(notes),
    )


def _row(name: str, term: str, tensor: str, gib: float) -> Holding:
    return Holding(name, term, tensor, int(gib * GIB), "measured")


def _layout(log: _Log) -> Layout | None:
    sizes = {k: int(v) for k, v in log.arguments.items() if k != "model_path" and 1 <= int(v) <= MAX_DEGREE}
    if "tp_size" not in sizes:
        return None
    tp_size, dp, attention = sizes["tp_size"], sizes.get("dp_size", 1), sizes.get("attn_dp_size", 1)
    if log.old_attention_dp and attention == 1:
        attention, dp = dp, 1
    if tp_size % attention:
        return None
    return Layout(tp=tp_size // attention, pp=sizes.get("pp_size", 1), dp=attention * dp, ep=sizes.get("ep_size", 1))


def _misleading(layout: Layout | None, log: _Log) -> tuple[tuple[str, str], ...]:
    out = [("... GB", "GB in SGLang's memory lines is GiB (1,073,741,824 bytes)")]
    if layout is not None and layout.dp > 1:
        size = log.arguments["tp_size"]
        out.append((f"tp_size={size}", f"spans all {size} ranks of a stage; attention is cut over {layout.tp} of them"))
        out.append(("max_total_num_tokens=N", f"is what one of {layout.dp} replicas of the attention holds"))
    return tuple(out)
