"""The order of samples: keyed permutations, mixtures, schedules."""
