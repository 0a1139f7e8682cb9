"""``here``: the cluster of this machine, detected without torch.

NVIDIA through ``nvidia-smi``, AMD through ``amd-smi`` or ``rocm-smi``, otherwise the CPU. Every command is bounded
(``probe``), its output is untrusted text, and what cannot be seen is said in ``Cluster.notes``.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.cluster import Cluster
from meshwright.specs.detect_amd import amd_cluster
from meshwright.specs.detect_host import cpu_cluster
from meshwright.specs.detect_nvidia import nvidia_cluster
from meshwright.specs.probe import Probe


def detect(probe: Probe | None = None) -> Cluster:
    """Devices, memory, links and topology of this machine as a cluster of one node.

    Args:
        probe: how the machine is read; None: really.
    """
    probe = probe or Probe()
    notes: list[str] = []
    for read in (nvidia_cluster, amd_cluster):
        cluster, said = read(probe)
        if cluster is not None:
            return cluster
        notes += said
    host = cpu_cluster(probe)
    return replace(host, notes=(*notes, *host.notes))
