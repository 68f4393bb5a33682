# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.linear_cp COMMAND``."""

import argparse
import sys
import warnings


def main() -> int:
    """Run a command; its exit status is the process's."""
    parser = argparse.ArgumentParser(prog="python -m megatron.linear_cp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, known faults, and a numeric self-test")
    parser.parse_args()
    warnings.filterwarnings("ignore")  # of optional packages that are not installed
    # Imported here: --help must not wait for torch.
    from megatron.linear_cp import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
