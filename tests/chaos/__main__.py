"""`python -m tests.chaos --kills 50`: exit status 0 if the disturbed run's model and rows are the undisturbed one's."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import run


def main() -> int:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="processes to kill (50)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of moments and victims (1)")
    parser.add_argument("--folder", type=Path, help="an empty folder for logs and state; else one that is removed")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcome = run(chosen.folder or Path(temporary), chosen.kills, chosen.seed)
    of = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.kills.items()))
    print(f"killed {sum(outcome.kills.values())} processes ({of}) in {outcome.seconds:.0f} s, {outcome.starts} starts")
    print(f"{outcome.rounds} rounds; faults counted: {outcome.faults}")
    print(f"model {'bit-identical' if outcome.same_model else 'DIFFERS'}")
    print(f"rows {'byte-identical' if outcome.same_rows else 'DIFFER'}")
    done = sum(outcome.kills.values()) == chosen.kills
    if not done:
        print(f"the run ended before {chosen.kills} kills: raise the rounds")
    return 0 if outcome.same_model and outcome.same_rows and done else 1


if __name__ == "__main__":
    sys.exit(main())
