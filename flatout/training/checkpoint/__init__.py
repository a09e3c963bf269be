"""Checkpoints: the state that a resume needs, its tensors on disk, saving beside training, and
which checkpoints there are.
"""
