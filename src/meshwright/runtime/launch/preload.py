"""What the server of ranks imports: torch and everything a rank needs, once, with the garbage collector at rest.

Importing torch makes millions of objects that stay; looking for garbage among them costs an eighth of the import.
They are frozen, so that a rank's collector never touches their pages and these stay shared.
"""

import gc

gc.disable()
try:
    import meshwright.runtime.generate
    import meshwright.runtime.launch.rank  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
