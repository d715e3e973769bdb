"""What the shell's `replaylab` runs. It stands beside the package because whatever is imported of that imports torch
first, which takes seconds: Ctrl-C is one line then too."""

import sys


def main() -> int:
    try:
        from replaylab.cli import main as run
    except KeyboardInterrupt:
        print("replaylab: stopped", file=sys.stderr)
        return 1
    return run()
