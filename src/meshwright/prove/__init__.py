"""Does a layout compute what one process computes, and send what was predicted?"""

from meshwright.prove.proof import Check, Proof, prove

__all__ = ["Check", "Proof", "prove"]
