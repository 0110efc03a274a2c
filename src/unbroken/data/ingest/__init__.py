"""From raw text to shards: sources, tokenizers, units of work, and their publication, resumable after any kill."""
