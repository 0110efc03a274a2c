"""Which sample comes when: keyed permutations, mixtures, schedules."""
