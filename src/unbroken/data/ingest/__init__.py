"""From raw text to shards: sources, tokenizers, units of work, publication; resumable after any kill."""
