"""The command line: one thin file a verb."""

import gc

# A plan makes some 100,000 objects that live to its end: looking through them every 700 took a tenth of its time.
gc.set_threshold(50_000, 20, 20)
