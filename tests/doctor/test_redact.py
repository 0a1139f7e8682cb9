"""``--redact``: no token, key, host, address, user or path of dumps and logs in any output; line numbers stay."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from meshwright.doctor.redact import redact

from .fr_maker import Simulator, dump
from .fr_mistakes import LAYOUTS, MISTAKES
from .test_command import Doctor, doctor  # noqa: F401 - a fixture

SECRETS = {
    "token": "hf_AbCdEfGhIjKlMnOpQrStUv",
    "key": "sk-proj-a1b2c3d4e5f6g7h8",
    "cloud key": "AKIAIOSFODNN7EXAMPLE",
    "password": "hunter2hunter2",
    "address": "10.11.12.13",
    "address 6": "fe80::1ff:fe23:4567:890a",
    "host": "gpu-node-17.cluster.internal",
    "short host": "trn-dgx-0042",
    "user": "annabel",
    "mail": "ann.b@corp.example",
    "url": "minio.corp.example:9000",
    "hash": "d41d8cd98f00b204e9800998ecf8427e",
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"HF_TOKEN={SECRETS['token']} python train.py", "python train.py"),
        (f"Authorization: Bearer {SECRETS['key']} failed", "failed"),
        (f"wandb password: {SECRETS['password']}; step 7", "step 7"),
        (f"[rank3]: connect to {SECRETS['address']}:29500 failed", "[rank3]: connect to <address> failed"),
        (f"peer {SECRETS['address 6']} is gone", "is gone"),
        (f"on {SECRETS['host']}: out of memory", "out of memory"),
        (f'File "/home/{SECRETS["user"]}/proj/loader.py", line 35, in load', 'loader.py", line 35, in load'),
        (rf"C:\Users\{SECRETS['user']}\x\train.py:12", "train.py:12"),
        (f"~/{SECRETS['user']}/x/train.py:12", "train.py:12"),
        (f"s3://{SECRETS['url']}/bucket/data.bin", "s3://<host>"),
        (f"mailto {SECRETS['mail']}", "mailto <address>"),
        (f"revision {SECRETS['hash']}", "revision <secret>"),
    ],
)
def test_texts(text: str, kept: str) -> None:
    clean = redact(text)
    assert kept in clean
    assert not [name for name, secret in SECRETS.items() if secret in clean]


def test_what_a_finding_needs_stays() -> None:
    text = "rank 7 never entered all_reduce #59958 of default_pg; it sits in load_batch, loader.py:35"
    assert redact(text) == text
    assert redact("ran for 600077 milliseconds, torch 2.13.0, NCCL 2.27.3, [3, 4] Float") == (
        "ran for 600077 milliseconds, torch 2.13.0, NCCL 2.27.3, [3, 4] Float"
    )


def _leaky(folder: Path) -> Path:
    """An incident with secrets wherever a text may stand: dumps, logs, file names."""
    folder.mkdir()
    simulator = Simulator(MISTAKES["skipped call"][2](LAYOUTS["dp8"]())).run()
    for rank in range(8):
        data = dump(simulator, rank)
        for entry in data["entries"]:
            name, desc = entry["process_group"]
            entry["process_group"] = (name, f"{desc}@{SECRETS['host']}")
            entry["input_dtypes"] = [SECRETS["token"]]
            for frame in entry["frames"]:
                frame["filename"] = f"/home/{SECRETS['user']}{frame['filename']}"
        for config in data["pg_config"].values():
            config["desc"] += f"@{SECRETS['host']}"
        (folder / f"{SECRETS['token']}_{rank}").write_bytes(pickle.dumps(data, protocol=2))
    lines = [
        f"{SECRETS['short host']}:77:78 [0] NCCL INFO cudaDriverVersion 12040",
        f"{SECRETS['short host']}:77:78 [0] NCCL WARN connect to {SECRETS['address']}<41111> failed",
        "[rank1]: Traceback (most recent call last):",
        f'[rank1]:   File "/home/{SECRETS["user"]}/p/train.py", line 3, in main',
        f"[rank1]: ValueError: token={SECRETS['token']} at {SECRETS['url']} of {SECRETS['mail']}",
        "[0]:",
        "  time      : 2026-03-04_05:06:07",
        f"  host      : {SECRETS['short host']}",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 77)",
        "[1]:",
        "  time      : 2026-03-04_05:06:07",
        "  host      : other-host-9",
        "  rank      : 2 (local_rank: 2)",
        "  exitcode  : -15 (pid: 78)",
    ]
    (folder / f"{SECRETS['user']}.log").write_text("\n".join(lines) + "\n")
    (folder / f"{SECRETS['key']}.bin").write_bytes(bytes(range(256)))
    return folder


def test_no_output_holds_a_secret(doctor: Doctor, tmp_path: Path) -> None:  # noqa: F811
    folder, page, trace = _leaky(tmp_path / "incident"), tmp_path / "p.html", tmp_path / "t.json"
    code, out, err = doctor(folder, "--redact", "--html", page, "--perfetto", trace)
    _, data, _ = doctor(folder, "--redact", "--json")
    assert code == 1
    assert json.loads(data)["findings"]
    outputs = {"text": out + err, "json": data, "page": page.read_text(), "trace": trace.read_text()}
    named = {"token", "key", "password", "address", "host", "short host", "mail", "url", "hash"}
    found = {(where, name) for where, text in outputs.items() for name in named if SECRETS[name] in text}
    assert not found
    assert not {where for where, text in outputs.items() if f"/home/{SECRETS['user']}" in text}
    (folder / f"{SECRETS['user']}.log").unlink()
    doctor(folder, "--redact", "--html", page)
    assert "<svg" in page.read_text()
    assert not [name for name in named if SECRETS[name] in page.read_text()]


def test_without_it_they_are_there(doctor: Doctor, tmp_path: Path) -> None:  # noqa: F811
    """The test above can fail."""
    out = doctor(_leaky(tmp_path / "incident"))[1]
    assert SECRETS["token"] in out
