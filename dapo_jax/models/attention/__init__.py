"""Attention of training: XLA, splash (TPU) and flash (GPU) kernels, zig-zag order."""
