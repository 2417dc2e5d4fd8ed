"""Tests of the runner on the Triton kernels, in Triton's interpreter.

The interpreter must be chosen before triton is first imported, and then holds for the process. So
these tests run in a process of their own, which `test_interpreted_model.py` starts; here, where
the choice was not made, they are not collected.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
