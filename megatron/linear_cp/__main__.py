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
    warnings.filterwarnings("ignore")  # of optional packages that are not installed
    if sys.argv[1:2] == ["plan"]:
        # Imported here: --help must not wait for torch.
        from megatron.linear_cp import planner

        plan = commands.add_parser("plan", help="what each mode costs on given sequence lengths")
        planner.add_arguments(plan)
        return planner.main(parser.parse_args())
    commands.add_parser("plan", help="what each mode costs on given sequence lengths")
    parser.parse_args()
    from megatron.linear_cp import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
