"""Files that an export contains: a model as one class of transformers, without flatout."""
