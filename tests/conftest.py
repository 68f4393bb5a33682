# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: one thread and a fixed seed."""

import pytest
import torch

# Worker processes run beside the tests; more threads than cores only make both slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240229)
