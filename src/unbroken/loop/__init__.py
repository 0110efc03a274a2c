"""``Run`` and what happens at a step's edge."""
