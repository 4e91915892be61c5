"""Checkpoints: what an engine holds, as named tensors that any other layout can load.

Read in this order: checkpoints (the verbs), contents (what is saved, under which names), planning
(who writes what), saving, extra, blocks (the large files), manifest (the small ones), folders (when
a checkpoint is whole); then loading, spans (how a rank's part is described to DCP, that is to
torch.distributed.checkpoint), source and reading; then export.
"""
