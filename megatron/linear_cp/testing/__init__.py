# SPDX-License-Identifier: Apache-2.0
"""What tests need: references, parity checks, worker processes, and a stand-in for CUDA."""
