"""`python -m jetserve.kernels [--json] [--cache_dir=FOLDER]`: this machine's kernels, and what each operation runs."""

import argparse
import json
import logging
from pathlib import Path

from jetserve.kernels import native
from jetserve.kernels.report import report


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m jetserve.kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--cache_dir", type=Path, help="where the kernels are kept, as other commands have it")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.cache_dir is not None:
        native.use_cache_dir(args.cache_dir.expanduser())
    found = report()
    print(json.dumps(found.as_json()) if args.json else found)


if __name__ == "__main__":
    main()
