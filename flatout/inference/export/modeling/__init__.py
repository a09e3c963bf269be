"""The file that an export contains when transformers has no class for its shape."""
