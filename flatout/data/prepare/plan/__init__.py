"""The work plan: split, tokenizer and ranges, decided once and kept in the work directory."""
