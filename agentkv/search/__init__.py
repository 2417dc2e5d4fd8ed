"""Ways to search with branches: what a loop over forks, scores and releases adds up to."""
