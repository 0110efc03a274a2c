"""What a person sees: tables and styles for a terminal, without a dependency."""
