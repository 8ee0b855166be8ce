"""A coordinator under cProfile: `python profiled.py FILE ...` takes a coordinator's flags and writes FILE at its end.

Only the event loop's thread is watched.
"""

import cProfile
import sys

# What a coordinator loads when it begins to serve, so that loading is not in the profile.
import ayni.flags
import ayni.logs  # noqa: F401
import coordinator_service.server  # noqa: F401
from coordinator_service.__main__ import main

if __name__ == "__main__":
    with cProfile.Profile() as profile:
        code = main(sys.argv[2:])
    profile.dump_stats(sys.argv[1])
    sys.exit(code)
