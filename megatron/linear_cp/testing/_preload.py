# SPDX-License-Identifier: Apache-2.0
"""Imported once by the fork server of ``workers.py``, so that a worker process pays only a fork.

Nothing here may run a tensor operation: a thread started before the fork is missing in the worker,
and the first parallel region there would wait for it for ever.
"""

import gc
import importlib
import os
import warnings

MODULES = (
    "torch",
    "torch.distributed",
    "numpy",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
    "megatron.linear_cp",
    "megatron.linear_cp.gated_delta_net",
    "megatron.linear_cp.layer_specs",
    "megatron.linear_cp.testing.cpu",
)
# workers.py names here what else the test session uses (pytest, hypothesis).
EXTRA_MODULES = os.environ.get("LINEAR_CP_PRELOAD", "").split()

for _name in (*MODULES, *EXTRA_MODULES):
    try:
        with warnings.catch_warnings():
            # Megatron-Core tells what is not installed; the test session has said it already.
            warnings.simplefilter("ignore")
            importlib.import_module(_name)
    except Exception as error:
        # The worker meets the same error where it can be reported; the server has to survive it.
        warnings.warn(f"fork server could not preload {_name}: {error!r}", stacklevel=1)

# What exists now never becomes garbage: keep the workers' collector away from it, or every worker
# copies the whole heap page by page.
gc.collect()
gc.freeze()
