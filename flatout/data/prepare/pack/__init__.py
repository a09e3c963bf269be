"""From documents to packed tokens: jobs, ranges, tokenisation, and the files of one range."""
