"""Command line of the benchmarks: `python -m benchmarks NAME [options]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import allocation, codec, feedback, loss, memories, operators


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 1 when a checked limit was broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time the parts that must be fast.")
    names = parser.add_subparsers(dest="name", required=True)
    one = names.add_parser("codec", help="selection, whole compress, decode and move, against a memcpy of the input")
    one.add_argument("--repeat", type=int, default=9, metavar="N", help="take the minimum of N interleaved runs (9)")
    one.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    one.add_argument("--check", action="store_true", help="exit 1 when a limit is broken in three attempts")
    two = names.add_parser("allocation", help="what each allocation loses at the same bytes, beside 64-bit pairs")
    two.add_argument("--repeat", type=int, default=3, metavar="N", help="take the minimum of N runs (3)")
    two.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    four = names.add_parser("operators", help="bits, error and time of every operator on a million values")
    four.add_argument("--repeat", type=int, default=5, metavar="N", help="take the minimum of N runs (5)")
    four.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    three = names.add_parser("feedback", help="rounds to a target at the bytes of 1 %% of uncoded pairs, by seeds")
    three.add_argument("problems", nargs="*", default=["digits"], metavar="PROBLEM", help="of digits, fashion-mnist")
    three.add_argument("--processes", type=int, default=2, metavar="N", help="runs at a time (2)")
    three.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    five = names.add_parser("loss", help="what 5 %% of lost replies cost, with and without the protocol, by seeds")
    five.add_argument(
        "problems", nargs="*", default=list(loss.PROBLEMS), metavar="PROBLEM", help="of " + ", ".join(loss.PROBLEMS)
    )
    five.add_argument("--seeds", type=int, default=10, metavar="N", help="paired runs of each (10)")
    five.add_argument("--processes", type=int, default=2, metavar="N", help="runs at a time (2)")
    five.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    six = names.add_parser("memories", help="what the memories cost at both ends: time, disk and RAM, with targets")
    six.add_argument("--rounds", type=int, default=100, metavar="N", help="take medians of N rounds (100, least 20)")
    six.add_argument("--folder", type=Path, metavar="PATH", help="where to make the stores (the temporary folder)")
    six.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    chosen = parser.parse_args(arguments)
    if chosen.name in ("feedback", "loss"):
        known = feedback.PROBLEMS if chosen.name == "feedback" else loss.PROBLEMS
        if unknown := sorted(set(chosen.problems) - set(known)):
            parser.error(f"unknown problems {', '.join(unknown)}: expected some of {', '.join(known)}")
        if chosen.name == "loss":
            return loss.run(chosen.problems, max(1, chosen.seeds), max(1, chosen.processes), chosen.json)
        return feedback.run(chosen.problems, max(1, chosen.processes), chosen.json)
    if chosen.name == "memories":
        if chosen.rounds < 20:
            parser.error("--rounds must be at least 20")
        return memories.run(chosen.rounds, chosen.folder, chosen.json)
    if chosen.repeat < 1:
        parser.error("--repeat must be at least 1")
    if chosen.name == "operators":
        return operators.run(chosen.repeat, chosen.json)
    if chosen.name == "allocation":
        return allocation.run(chosen.repeat, chosen.json)
    return codec.run(chosen.repeat, chosen.json, check=chosen.check)


if __name__ == "__main__":
    sys.exit(main())
