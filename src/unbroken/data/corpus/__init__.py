"""What a data folder holds: shards, their list with digests, buckets."""
