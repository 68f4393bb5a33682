# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.linear_cp COMMAND``."""

import argparse
import importlib
import logging
import sys
import warnings
from typing import Any

_TOOLS = {
    "plan": ("megatron.linear_cp.planner", "what each mode costs on given sequence lengths"),
    "inspect": (
        "megatron.linear_cp.inspector",
        "what a run does with a saved micro-batch, and what it refuses",
    ),
}


def main() -> int:
    """Run a command; its exit status is the process's."""
    parser = argparse.ArgumentParser(prog="python -m megatron.linear_cp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, known faults, and a numeric self-test")
    # Says on every machine without a GPU that it has none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # of optional packages that are not installed
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    tool: Any = None
    for name, (module, text) in _TOOLS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            # Imported here: --help must not wait for torch.
            tool = importlib.import_module(module)
            tool.add_arguments(command)
    arguments = parser.parse_args()
    if tool is not None:
        status: int = tool.main(arguments)
        return status
    from megatron.linear_cp import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
