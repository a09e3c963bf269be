"""From documents to packed tokens: work items, tokenisation, and the files of one range."""
