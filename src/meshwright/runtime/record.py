"""Records what a rank does: every collective and hand-off of torch.distributed, and matrix products when asked."""

from __future__ import annotations

from meshwright.runtime.scope import scope

__all__ = ["scope"]
