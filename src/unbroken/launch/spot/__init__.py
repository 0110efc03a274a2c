"""Notices of machines that are about to be taken away: what each cloud says, who listens, and since when."""
