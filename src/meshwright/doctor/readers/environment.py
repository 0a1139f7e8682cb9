"""What a log or a dump of the environment says of versions and variables, to find ranks that differ."""

from __future__ import annotations

import re

from meshwright.doctor.readers.prefix import Prefix
from meshwright.doctor.readers.store import FileFacts

_VERSIONS = (
    (re.compile(r"PyTorch version: (?P<v>[\w.+-]{1,60})"), "torch_version"),
    (re.compile(r"CUDA used to build PyTorch: (?P<v>[\w.+-]{1,60})"), "cuda_version"),
    (re.compile(r"(?:\[pip3?\] )?torch==(?P<v>[\w.+-]{1,60})"), "torch_version"),
    (re.compile(r"(?:\[pip3?\] )?nvidia-nccl-cu\d\d==(?P<v>[\w.+-]{1,60})"), "nccl_version"),
    (re.compile(r"Nvidia driver version: (?P<v>[\w.+-]{1,60})"), "driver_version"),
)
_VARIABLE = re.compile(
    r"(?:export |declare -x )?"
    r"(?P<name>(?:NCCL|TORCH|GLOO|CUDA|RCCL|HCCL|UCX|FI|VLLM|SGLANG|OMP|PYTORCH|DS)_[A-Z0-9_]{1,80})="
    r"(?P<value>[^\n]{0,400})$"
)
#: Parts of names whose values are nobody's business.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_KEY|_KEY$")
#: Variables that name the process; they differ between ranks of a healthy job.
PER_PROCESS = frozenset({"CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "TORCHELASTIC_ERROR_FILE", "OMP_PLACES"})


def is_environment(text: str) -> bool:
    """Whether a line is of the kind that ``environment`` notes."""
    return ("=" in text and _VARIABLE.match(text) is not None) or any(p.match(text) for p, _ in _VERSIONS)


def environment(prefix: Prefix, line: int, facts: FileFacts) -> bool:
    """Note a version or a variable that stands alone on its line."""
    text = prefix.rest.strip()
    if "=" in text and (match := _VARIABLE.match(text)):
        name, value = match["name"], match["value"].strip().strip("\"'")
        if _SECRET.search(name):
            return True
        data: dict[str, object] = {"name": name, "value": value, "per_process": name in PER_PROCESS}
        facts.add("env", prefix, line, data, text=f"{name}={value}", same=(name, value))
        return True
    if "torch" in text.lower() or "nccl" in text or "driver" in text:
        for pattern, name in _VERSIONS:
            if match := pattern.match(text):
                facts.add("env", prefix, line, {"name": name, "value": match["v"]}, same=(name, match["v"]))
                return True
    return False
