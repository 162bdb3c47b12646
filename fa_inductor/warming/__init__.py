"""Kernels made ready before they are needed, also on a machine without a GPU."""
