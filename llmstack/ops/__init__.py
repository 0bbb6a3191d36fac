"""The mathematics, one file an operation: NumPy with a backward by hand, torch as models call it, Triton where it pays.

Each file's IMPLS names its implementations, BACKWARDS those of the gradient, and AOT how its kernels are compiled.
"""
