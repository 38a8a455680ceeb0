"""Attention in training: XLA's, splash (TPU), cuDNN's and flash (GPU) kernels, zig-zag order."""
