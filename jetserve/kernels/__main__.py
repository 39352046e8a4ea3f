"""`python -m jetserve.kernels [--json]`: this machine's kernels, and the implementation that each operation runs."""

import argparse
import json
import logging

from jetserve.kernels.report import report


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m jetserve.kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found = report()
    print(json.dumps(found.as_json()) if args.json else found)


if __name__ == "__main__":
    main()
