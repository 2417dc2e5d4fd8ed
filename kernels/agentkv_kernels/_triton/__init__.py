"""The implementation for GPUs, in Triton: kernels, and the functions that launch them.

Each file holds one kernel and its launcher. `ops` checks arguments before it comes here. Importing
this package imports triton, which fails where triton does not exist: import it where it is used.
"""
