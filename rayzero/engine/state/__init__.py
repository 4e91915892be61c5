"""Checkpoints: what an engine holds, as named tensors that any other layout can load.

Read in this order: checkpoints (the verbs), contents (what is saved, under which names), spans (how
one rank's part of a named tensor is described to torch.distributed.checkpoint), storage and blocks
(the files), manifest and folders (when a checkpoint is whole), saving and loading, export.
"""
