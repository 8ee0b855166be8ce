"""How much a new link may read of a peer to find out whether it works.  [core]"""

MOST_WARM_UP_BYTES = 64 << 20
"""Larger blocks are not read: what a peer says of itself must not cost memory here."""
