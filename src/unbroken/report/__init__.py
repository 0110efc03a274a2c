"""Tables and styles for a terminal, without dependencies."""
